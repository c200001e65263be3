"""GET /props, /slots: what this server is and what it does right now."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.api.context import Api, ApiDep
from app.api.docs import LOOKING, answers
from app.api.errors import Disabled
from app.api.schemas.facts import Props, Slot
from app.engine.request import SamplingParams
from app.engine.service import SlotInfo
from app.errors import CapacityError

router = APIRouter(tags=["state"])

Flag = Annotated[bool, Query()]


@router.get("/props", **answers(Props, (*LOOKING, 501)))
@router.get("/v1/props", include_in_schema=False)
async def props(api: ApiDep) -> dict[str, Any]:
    """Facts about the server under llama-server's names; editors and web pages read them."""
    check_enabled(api.options.enable_props, "props")
    api.check_loaded()
    info, tokenizer = api.service.info, api.service.tokenizer
    return {
        "default_generation_settings": {
            "id": 0,
            "n_ctx": info.n_ctx,
            "speculative": False,
            "is_processing": False,
            "params": sampling_settings(api.options.sampling),
        },
        "total_slots": info.n_slots,
        "model_alias": info.alias,
        "model_path": info.path,
        "model_ftype": info.file_type,
        "modalities": {"vision": False, "audio": False},
        "chat_template": api.service.template.source,
        "bos_token": special_text(api, tokenizer.bos),
        "eos_token": special_text(api, tokenizer.eos),
        "devices": list(info.devices),
        "build_info": api.fingerprint,
        "is_sleeping": False,
    }


@router.get("/slots", **answers(list[Slot], (*LOOKING, 400, 501)))
@router.get("/v1/slots", include_in_schema=False)
async def slots(api: ApiDep, fail_on_no_slot: Flag = False) -> list[dict[str, Any]]:
    """What each slot works on; with `fail_on_no_slot`, 503 when all are busy."""
    check_enabled(api.options.enable_slots, "slots")
    api.check_loaded()
    all_slots = api.service.slots()
    if fail_on_no_slot and all(slot.busy for slot in all_slots):
        raise CapacityError("all slots are busy")
    return [slot_object(slot, api.service.info.n_ctx) for slot in all_slots]


def check_enabled(enabled: bool, name: str) -> None:
    if not enabled:
        raise Disabled(f"this server was started without /{name}; start it with --{name}")


def sampling_settings(sampling: SamplingParams) -> dict[str, Any]:
    """The defaults of fields that requests leave out."""
    settings = dataclasses.asdict(sampling)
    for name in ("n_logprobs", "logit_bias"):
        del settings[name]
    return {**settings, "seed": -1 if sampling.seed is None else sampling.seed}


def special_text(api: Api, token: int | None) -> str:
    return "" if token is None else api.service.tokenizer.decode([token], show_special=True)


def slot_object(slot: SlotInfo, n_ctx: int) -> dict[str, Any]:
    """One slot; the names that llama-server has are its names."""
    return {
        "id": slot.id,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": slot.busy,
        "id_task": slot.request_id,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_cache": slot.n_cached,
        "n_prompt_tokens_processed": slot.n_processed,
        "next_token": [{"has_next_token": slot.busy, "n_decoded": slot.n_decoded}],
    }
