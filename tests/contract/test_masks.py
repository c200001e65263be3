"""Masks of their recipes are the bytes that they are anywhere else, in their place and in their turn."""

from __future__ import annotations

from functools import partial

import pytest

from app.engine.device import Device
from app.engine.mask import CellRun, MaskRecipe, MaskRows
from app.errors import DeviceError
from tests.contract.driving import TIMEOUT_S, fails, gate, get

_ROWS = (MaskRows(0, 5, (CellRun(64, 64), CellRun(192, 30))), MaskRows(6, 1, (CellRun(0, 7),)))
RECIPES = {
    "small": MaskRecipe(8, 256, None, _ROWS),
    "windowed": MaskRecipe(8, 256, 40, _ROWS),
    "large": MaskRecipe(64, 4096, None, (MaskRows(0, 61, (CellRun(128, 3000),)),)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_mask_is_written_of_its_recipe(device: Device, name: str) -> None:
    recipe = RECIPES[name]
    buffer = device.alloc(recipe.n_bytes + 96)
    device.fill(buffer, 0, buffer.size_bytes, 7)
    device.write_mask(buffer, 32, recipe).result(TIMEOUT_S)
    assert get(device, buffer) == b"\7" * 32 + recipe.array.tobytes() + b"\7" * 64
    device.free(buffer)


def test_masks_take_effect_in_call_order(device: Device) -> None:
    masks = list(RECIPES.values())
    buffer = device.alloc(max(recipe.n_bytes for recipe in masks) + 1)
    payload = gate(device, buffer, buffer.size_bytes - 1)
    reads = []
    for recipe in masks:
        device.write_mask(buffer, 0, recipe)
        reads.append(device.read(buffer, 0, recipe.n_bytes))
    assert not any(read.done() for read in reads)
    payload.set_result(b"!")
    for recipe, read in zip(masks, reads, strict=True):
        assert bytes(read.result(TIMEOUT_S)) == recipe.array.tobytes()
    device.free(buffer)


@pytest.mark.parametrize("name", ["small", "large"])
def test_masks_that_do_not_fit_are_refused(device: Device, name: str) -> None:
    recipe = RECIPES[name]
    buffer = device.alloc(recipe.n_bytes + 2)
    device.write_mask(buffer, 2, recipe).result(TIMEOUT_S)
    for offset in (-2, 1, 4):
        fails(DeviceError, partial(device.write_mask, buffer, offset, recipe))
    device.free(buffer)
    fails(DeviceError, lambda: device.write_mask(buffer, 0, recipe))
