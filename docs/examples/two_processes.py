"""One velocity computed by two processes, which on a cluster would be two hosts."""

import socket
import subprocess
import sys

import jax
import jax.random as jr
import numpy as np

import meanformer as mf

COUNT = 1000


def compute(index: int, address: str) -> None:
    """Be one of the two processes: compute a share of the velocity and check it."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=index)
    mesh = jax.make_mesh((jax.device_count(),), ("tokens",))
    attention = mf.identity_attention("softmax", dimension=3, beta=4.0)

    points = mf.UniformSphere(3).sample(COUNT, key=jr.key(0))
    sums = mf.Sharded(mesh)
    cloud = sums.place(mf.TokenCloud(points, sums=sums))
    velocity = attention(cloud, cloud.points)

    expected = np.asarray(attention(mf.TokenCloud(points), points))
    shares = velocity.addressable_shards
    differences = [np.asarray(share.data) - expected[share.index] for share in shares]
    rows, error = sum(map(len, differences)), np.abs(differences).max()
    print(
        f"process {index} computed {rows} of {COUNT} rows on {len(shares)} of "
        f"{jax.device_count()} devices; largest difference {error:.1e}"
    )


def start_both() -> None:
    """Start the two processes on this machine and wait for them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    commands = [[sys.executable, __file__, str(index), address] for index in range(2)]
    processes = [subprocess.Popen(command) for command in commands]
    failures = [process.wait() for process in processes]
    if any(failures):
        raise SystemExit("a process has failed")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        start_both()
    else:
        compute(int(sys.argv[1]), sys.argv[2])
