"""EAGLE-3 and DFlash inside llama.cpp, through its library: one context of the target and one of the drafter.

The order of calls is that of common/speculative.cpp in github.com/ggml-org/llama.cpp (0c1e57098), which the Python
binding does not contain. The functions that read states are exported under their C++ names.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Shapes: T tokens, F features, H hidden size, V vocabulary, b block size.


class Engine:
    """A target and a drafter, both GGUF files."""

    def __init__(self, llama_cpp: Any, target: Path, drafter: Path) -> None:
        self.api, self.library = llama_cpp, llama_cpp.llama_cpp._lib
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self.target, self.drafter = (self._model(file) for file in (target, drafter))
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.target))
        self.of_target = self._context(self.target, None)
        self.of_drafter = self._context(self.drafter, self.of_target)

    def _model(self, file: Path) -> Any:
        model = self.api.llama_model_load_from_file(str(file).encode(), self.api.llama_model_default_params())
        assert model, f"llama.cpp does not load {file}"
        return model

    def _context(self, model: Any, other: Any) -> Any:
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 64
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.type_k = parameters.type_v = 0  # float32
        parameters.flash_attn_type = 0
        if other is not None:
            parameters.ctx_other = other
        context = self.api.llama_init_from_model(model, parameters)
        assert context, "llama.cpp makes no context"
        return context

    def _call(self, name: str, *arguments: Any, result: Any = None) -> Any:
        function = getattr(self.library, name)
        function.restype = result
        return function(*(ctypes.c_void_p(a) if isinstance(a, int) and a > 2**31 else a for a in arguments))

    def layers(self) -> list[int]:
        """Return the layers that the drafter's file names."""
        name, ints = "_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32)
        count = self._call("_Z30llama_model_target_layer_ids_nPK11llama_model", self.drafter, result=ctypes.c_uint32)
        ids = self._call(name, self.drafter, result=ints)
        return [ids[k] for k in range(count)]

    def features(self, tokens: list[int]) -> Tensor:
        """Return the inputs [T, F] of the target's blocks that the drafter reads, one beside the other."""
        layers = self.layers()
        for layer in layers:
            self._call("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", self.of_target, layer, True)
        batch = self._batch(self.of_target, list(enumerate(tokens)), None)
        assert self.api.llama_process(self.of_target, 1, batch) == 0
        size, parts = self.api.llama_model_n_embd(self.target), []
        for layer in layers:
            name, floats = "_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.POINTER(ctypes.c_float)
            parts.append(_read(self._call(name, self.of_target, layer, result=floats), len(tokens), size))
        return torch.cat(parts, -1)

    def _batch(self, context: Any, tokens: list[tuple[int, int | None]], rows: Tensor | None) -> Any:
        """Return a batch of (position, token) with a row of `rows` for each; None: the row alone."""
        batch = self.api.llama_batch_ext_init(context)
        for index, (position, token) in enumerate(tokens):
            row = None if rows is None else self._embd(rows[index])
            if token is None:
                place = self.api.llama_batch_ext_add_embd(batch, 0, row)
            else:
                place = self.api.llama_batch_ext_add_token(batch, 0, token)
                if row is not None:
                    assert self.api.llama_batch_ext_set_embd_token(batch, place, row)
            positions = (ctypes.c_int32 * 4)(position, position, position, 0)
            assert self.api.llama_batch_ext_set_pos(batch, place, positions)
            assert self.api.llama_batch_ext_set_output_logits(batch, place, True)
        return batch

    def _embd(self, row: Tensor) -> Any:
        data = (ctypes.c_float * len(row))(*row.tolist())
        self._kept = [*getattr(self, "_kept", []), data]  # the batch may point to it
        return self.api.llama_embd(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), 1, len(row))

    def _logits(self, count: int) -> Tensor:
        return _read(self.api.llama_get_logits(self.of_drafter), count, self.vocab)

    def _states(self, count: int, size: int) -> Tensor:
        name, floats = "_Z26llama_get_embeddings_nextnP13llama_context", ctypes.POINTER(ctypes.c_float)
        return _read(self._call(name, self.of_drafter, result=floats), count, size)

    def eagle3(self, prompt: list[int], after: list[int]) -> Tensor:
        """Return logits [len(after), V] after the prompt and along the tokens `after`."""
        features, size = self.features(prompt), self.api.llama_model_n_embd(self.drafter)
        self._call("_Z26llama_set_embeddings_nextnP13llama_contextbb", self.of_drafter, True, True)
        places: list[tuple[int, int | None]] = [(position, None) for position in range(len(prompt))]
        assert self.api.llama_process(self.of_drafter, 0, self._batch(self.of_drafter, places, features)) == 0
        states, logits = self._states(len(prompt), size), []
        pairs: list[tuple[int, int | None]] = list(enumerate([*prompt[1:], after[0]]))
        for token in [*after[1:], None]:
            assert self.api.llama_process(self.of_drafter, 1, self._batch(self.of_drafter, pairs, states)) == 0
            logits.append(self._logits(len(pairs))[-1])
            states = self._states(len(pairs), size)[-1:]
            pairs = [(pairs[-1][0] + 1, token)]
        return torch.stack(logits)

    def block(self, prompt: list[int], anchor: int, mask: int, size: int) -> tuple[Tensor, Tensor]:
        """Return logits [b, V] and confidences [b] of a block, with the bias of tokens that llama.cpp chooses itself.

        Without a confidence head the second value has no meaning.
        """
        features = self.features(prompt)
        self._call("_Z26llama_set_embeddings_nextnP13llama_contextbb", self.of_drafter, True, True)
        self.api.llama_set_causal_attn(self.of_drafter, False)
        places: list[tuple[int, int | None]] = [(position, None) for position in range(len(prompt))]
        assert self.api.llama_process(self.of_drafter, 1, self._batch(self.of_drafter, places, features)) == 0
        tokens: list[tuple[int, int | None]] = [(len(prompt) + k, mask if k else anchor) for k in range(size)]
        assert self.api.llama_process(self.of_drafter, 1, self._batch(self.of_drafter, tokens, None)) == 0
        return self._logits(size), self._states(size, self.api.llama_model_n_embd(self.drafter))[:, 0]


def _read(pointer: Any, count: int, size: int) -> Tensor:
    return torch.tensor([pointer[i] for i in range(count * size)]).reshape(count, size)
