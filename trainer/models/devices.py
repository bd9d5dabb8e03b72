"""The device on which a process of a run computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from pipeline.core.errors import UsageError

# Torch's generator, threads and kernels belong to the whole program: computations that change them take turns.
_TORCH_STATE_LOCK = threading.RLock()

EVALUATOR = -1  # its place: the last GPU, which the first workers leave free if there are several


def device_of(device: str, place: int, cards: int) -> str:
    """Return the name of the device for a process. A pure function.

    Args:
        device: cpu, cuda, or auto, which is a GPU if the host has one.
        place: number of the worker on this host; workers are spread over the GPUs.
        cards: number of GPUs.
    Raises:
        UsageError: the host has no GPU, and device is cuda.
    """
    if device == "cuda" and not cards:
        raise UsageError("--device cuda: torch finds no GPU on this host; give --device cpu, or auto")
    return f"cuda:{place % cards}" if cards and device != "cpu" else "cpu"


def pick_device(device: str, place: int) -> torch.device:
    """Return the device of a process of this host. Raises UsageError."""
    cards = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return torch.device(device_of(device, place, cards))


def compute_reproducibly(device: torch.device) -> None:
    """Make this process add numbers on a GPU in a fixed order, so that a repeated step has the same bits.

    An operation of a user's model that has no reproducible implementation warns once. Convolutions keep torch's default
    precision (TF32). A no-op for a CPU."""
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS may choose other sums
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise a kernel fills every new tensor with NaN, although nothing reads them before they are written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def usual_torch() -> Iterator[None]:
    """Compute as in a new process, whatever the caller has set: in float32, on the CPU, with gradients, without autocast."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            # The weights that a step casts would stay in the cache of this outer block, for all later steps.
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        # As a context it would look at every call of torch. torch.get_default_device() would import a module.
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Restore the settings of torch that a computation in the caller's process changes: threads, generator, kernels.

    The caller's own settings do not change the computation: see ``usual_torch``. Another thread that enters such a block,
    or one of ``preserve_generator``, waits until this one is left."""
    with _TORCH_STATE_LOCK:
        threads = torch.get_num_threads()
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        # The generator of a card that nothing has used would be set up only to be restored.
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = list(range(torch.cuda.device_count())) if is_used else []
        with torch.random.fork_rng(devices=devices), usual_torch():
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)


@contextmanager
def preserve_generator() -> Iterator[None]:
    """Restore the state of the CPU's generator, and compute as ``usual_torch`` does.

    Other threads wait, as for ``preserve_torch_state``."""
    with _TORCH_STATE_LOCK, torch.random.fork_rng(devices=[]), usual_torch():
        yield


def load_libraries(device: torch.device) -> None:
    """Load the libraries of convolutions and products of matrices, which torch does at their first use.

    On a GPU this stops the other threads of Python for up to seconds, and with them a worker's heartbeats, which others
    await once it has joined. Draws no random numbers."""
    image, kernel = (torch.zeros(1, 1, 4, 4, device=device, requires_grad=True) for _ in range(2))
    product = torch.nn.functional.conv2d(image, kernel).flatten(2) @ torch.zeros(1, 1, device=device)
    for gradient in torch.autograd.grad(product.sum(), (image, kernel)):
        gradient.cpu()  # waits for the device
