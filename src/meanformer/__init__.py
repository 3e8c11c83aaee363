"""The numerical laboratory for transformers seen as maps between measures."""
