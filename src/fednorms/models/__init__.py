"""Models: networks of the papers, any network of torchvision and timm, and how to find the head of a network."""

from __future__ import annotations

from fednorms.core.head import split_head
from fednorms.models.registry import ModelInfo, build, models

__all__ = ["ModelInfo", "build", "models", "split_head"]
