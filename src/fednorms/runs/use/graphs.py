"""Write a model as a graph that takes images as they are stored: an ONNX file, or a program of torch.export."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput, RunFailed
from fednorms.data import Preprocessing
from fednorms.data.facts import Facts
from fednorms.runs.option_names import flag
from fednorms.runs.use.load import logits_of

ONNX, PROGRAM = "model.onnx", "model.pt2"


class FromImages(nn.Module):
    """A module with its preprocessing in front; without one, the images are normalized already.

    >>> FromImages(nn.Flatten(), Preprocessing())(torch.tensor([[[[255]]]], dtype=torch.uint8))
    (tensor([[1.]]), tensor([[1.]]))
    """

    def __init__(self, module: nn.Module, preprocessing: Preprocessing | None) -> None:
        super().__init__()
        self.module, self.preprocessing = module, preprocessing

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and probabilities."""
        if self.preprocessing is not None:
            like = next(self.module.parameters(), torch.zeros(()))
            images = self.preprocessing.cropped(images)
            mean, std = self.preprocessing.mean or (0.0,), self.preprocessing.std or (1.0,)
            center, scale = (torch.tensor(v, dtype=like.dtype).view(-1, 1, 1) for v in (mean, std))
            images = images.to(like.dtype) / 255 if images.dtype == torch.uint8 else images.to(like.dtype)
            images = (images - center) / scale
        logits = logits_of(self.module, images)
        return logits, logits.softmax(1)


def check_graphs(facts: Facts, onnx: bool, program: bool) -> None:
    """Refuse a graph that would miss a step between files and images, and missing packages, before any work."""
    asked = [name for name, wanted in (("onnx", onnx), ("torch_export", program)) if wanted]
    if asked and facts.prepared:
        raise BadInput(
            f"The training images were prepared ({facts.prepared}), which a graph cannot do. Export without "
            f"{' and '.join(map(flag, asked))}: read(file) in the export's load.py, `fednorms predict` and "
            "load_model(...).read prepare image files as in training."
        )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if onnx and missing:
        raise BadInput(f"ONNX export needs {' and '.join(missing)}. Install with: pip install 'fednorms[onnx]'")


def write_program(path: Path, module: nn.Module, fixed: Preprocessing | None, images: Tensor) -> float:
    """Write model.pt2, which `torch.export.load` reads; returns the largest difference of its logits on `images`."""
    whole = FromImages(module, fixed).eval()
    try:
        with _quiet():
            program = torch.export.export(whole, (images,), dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
            torch.export.save(program, path)
            again = torch.export.load(path).module()
    except OSError:
        raise
    except Exception as problem:  # what torch.export raises depends on what the model does
        raise _untraceable("torch.export", "torch_export", problem) from problem
    with torch.no_grad():
        return _difference(PROGRAM, again(images[:3])[0], whole(images[:3])[0])


def write_onnx(path: Path, module: nn.Module, fixed: Preprocessing | None, images: Tensor) -> float | None:
    """Write model.onnx; returns the largest difference of its logits on `images`, None without onnxruntime."""
    whole = FromImages(module, fixed).eval()
    try:
        with _quiet():
            torch.onnx.export(
                whole,
                (images,),
                str(path),
                input_names=["images"],
                output_names=["logits", "probabilities"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as problem:  # what torch.onnx raises depends on what the model does
        raise _untraceable("ONNX", "onnx", problem) from problem
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"images": images[:3].numpy()})[0])
    with torch.no_grad():
        return _difference(ONNX, found, whole(images[:3])[0])


def _untraceable(what: str, asked: str, problem: Exception) -> BadInput:
    reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return BadInput(
        f"{what} cannot trace this model: {reason}. Nothing was written. Export without {flag(asked)}, or change the "
        "model's forward so that it does not depend on the values of its input."
    )


def _difference(file: str, found: Tensor, expected: Tensor) -> float:
    """The largest difference of two batches of logits, refused where it is more than rounding."""
    difference = float((found - expected).abs().max())
    if not difference <= 1e-3 * max(1.0, float(expected.abs().max())):
        raise RunFailed(
            f"Logits of {file} differ from the model's by up to {difference:g}, so nothing was written. Does the model "
            "draw random numbers in evaluation, or depend on the size of the batch?"
        )
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch's tracer says about its own deprecations and steps."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with (
        warnings.catch_warnings(),
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
