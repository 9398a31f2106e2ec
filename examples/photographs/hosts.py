"""What tells the processes of a run their ranks and GPUs; where ranks share GPUs, NCCL takes them for several hosts.

NCCL ends with "Duplicate GPU detected" where two ranks of a communicator have one host and one GPU. It tells hosts by a
hash, of what NCCL_HOSTID says if that is set. So as many hosts as ranks share a GPU, with a rank on every GPU each, can
be had on one machine. Between them NCCL goes the way that it goes between machines, through sockets.
"""

# The network between hosts that are one machine: its own interface, and nothing that only one host can have.
NETWORK = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def ranks_per_gpu(ranks: int, gpus: int) -> int:
    """Return how many ranks share a GPU at most, where they are spread evenly."""
    return -(-ranks // gpus)


def placement(rank: int, ranks: int, gpus: int | None = None) -> dict[str, str]:
    """Return the environment of one rank.

    Args:
        rank: Its number.
        ranks: All of the run.
        gpus: GPUs that every rank sees; None for as many as there are ranks.
    """
    gpus = ranks if gpus is None else gpus
    variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % gpus)}
    if ranks <= gpus:
        return variables
    return {**variables, **NETWORK, "NCCL_HOSTID": f"host{rank // gpus}"}
