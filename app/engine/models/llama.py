"""llama: Llama 1 to 3, Mistral, Mixtral, SmolLM, TinyLlama and their fine-tunes."""

from __future__ import annotations

from app.engine.models.decoder import Decoder
from app.engine.models.rope import factor_tensor


class Llama(Decoder):
    """Rotates neighbouring channels; experts, if any, are as wide as the dense part would be."""

    def read(self) -> None:
        if self.p.n_rot != self.p.key_length:
            raise self.keys.error(
                f"llama rotates whole heads, but llama.rope.dimension_count is {self.p.n_rot} "
                f"and the key length {self.p.key_length}"
            )
        super().read()
        self.rope_factors = factor_tensor(self.keys, self.n_ctx)
