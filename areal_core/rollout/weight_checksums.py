"""The checksums that SGLang's `/weights_checker` takes of its weights, taken of ours."""

import hashlib

import torch
from torch import Tensor


def sha256_of(tensor: Tensor) -> str:
    """16 hex digits: the first 8 bytes of the SHA-256 of the tensor's bytes, as a server on the CPU takes it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(flat.numpy())).hexdigest()[:16]
