"""A causal model of transformers with a window of attention and memories of what left it; its weights are frozen."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from titans.adapters.lora import add_lora, check_lora, lora_weights
from titans.adapters.memory import TapMemory
from titans.adapters.window import NAME, View, WindowCache, decoder_of, make_view
from titans.ops import MemoryState

BLOCK = 512  # tokens that are read at a time
HEAD = "head"  # where a memory adds to the logits themselves
KEYS = (0.2, 0.4)  # of the layers: states that tell what a token follows
MEANING = (0.5, 0.7)  # states that tell what is talked about
EVERY = 1 << 30  # a window that no text fills
# Of a memory: forgetting a four-hundredth per token, as a memory does at its start, is too much for a long text.
DEFAULTS: dict[str, Any] = {"momentum": False, "forgetting": False}


@dataclass
class Call:
    """What the layers of the model tell each other during one call: it goes through them as the argument ``view``.

    Attributes:
        view: of the queries.
        mask: (batch, time) bool, False for padding; None: there is none.
        states: of each memory, before and after the call.
        taps: the hidden states that were tapped, by number.
        said: what the memories that write at the head said, by their number, and how far each is open.
        use_memory: False: the memories are neither asked nor told.
    """

    view: View
    mask: Tensor | None
    states: list[MemoryState | None]
    use_memory: bool = True
    taps: dict[int, Tensor] = field(default_factory=dict)
    said: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class AdaptedCache(WindowCache):
    """A window of keys and values, and the state of every memory.

    Attributes:
        memories: None before the first token.
    """

    def __init__(self, layers: int, window: int, sinks: int, memories: int) -> None:
        super().__init__(layers, window, sinks)
        self.memories: list[MemoryState | None] = [None] * memories

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function to every tensor, sequences first."""
        super().map(function)
        self.memories = [None if state is None else state.map(function) for state in self.memories]

    def copy(self) -> AdaptedCache:
        """Another cache with the same contents: a call replaces tensors and never changes one."""
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        other.memories = list(self.memories)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptedCache:
        return self.copy()

    def reset(self) -> None:
        """Back to the start of a sequence."""
        super().reset()
        self.memories = [None] * len(self.memories)

    @property
    def nbytes(self) -> int:
        """What the cache weighs."""
        weight = 0

        def count(x: Tensor) -> Tensor:
            nonlocal weight
            weight += min(x.nbytes, x.untyped_storage().nbytes())  # one zero may stand for a whole momentum
            return x

        self.map(count)
        return weight


class AdaptedModel(PreTrainedModel, GenerationMixin):
    """A causal model with a window of attention, and memories. Made by :func:`adapt`.

    The weights of the model are frozen; memories, and low-rank updates if there are any, can be trained.

    Attributes:
        backbone: the model, which this one owns now: its attention is the window's.
        source: where it comes from, see :func:`titans.adapters.load_backbone`.
        notes: how the memories and the updates came to be what they are.
        memories: one for each of ``taps``.
        window, sinks, taps, inject, lora: see :func:`adapt`.
    """

    _is_stateful = True  # a memory cannot take tokens back, as assisted generation would have it do

    def __init__(
        self,
        backbone: PreTrainedModel,
        decoder: Any,
        window: int,
        sinks: int,
        taps: Sequence[Sequence[int]],
        inject: Sequence[int | str],
        settings: Mapping[str, Any],
        lora: int | None = None,
    ) -> None:
        if backbone.config._attn_implementation == NAME:
            raise ValueError("model has a window already; expected one that was not adapted before")
        count, own = len(decoder.layers), _own_window(backbone.config)
        if sinks < 0:
            raise ValueError(f"sinks is {sinks}; expected a whole number of at least 0")
        if window <= sinks:
            raise ValueError(f"window is {window} and sinks is {sinks}; expected a window above the sinks")
        if own is not None and window > own:
            raise ValueError(f"window is {window}; expected at most {own}, the window of the model itself")
        for each, where in zip(taps, inject, strict=True):
            _check_places(each, where, count)
        if lora is not None:
            check_lora(backbone, lora)
        backbone.set_attn_implementation(NAME)
        super().__init__(backbone.config)
        self.backbone = backbone.requires_grad_(False)
        self.window, self.sinks = window, sinks
        self.taps, self.inject = [list(each) for each in taps], list(inject)
        self.settings = dict(DEFAULTS) | dict(settings)
        self.memories = nn.ModuleList(map(self._new_memory, taps, inject))
        self.source: str = backbone.config._name_or_path  # where the backbone comes from
        self.notes: dict[str, Any] = {}
        self.generation_config = backbone.generation_config
        self._decoder = [decoder]  # not a module of its own
        self._hooks: list[Any] = []
        self.register_hooks()
        self.lora: int | None = None
        if lora is not None:
            self.add_lora(lora)

    def _new_memory(self, taps: Sequence[int], inject: int | str) -> TapMemory:
        words, size = self.embedding.shape
        return TapMemory(len(taps), size, words, inject == HEAD, **self.settings).to(self.backbone.device)

    def add_memory(self, taps: Sequence[int], inject: int | str = HEAD) -> None:
        """One more memory, which is silent at first; see :func:`adapt`."""
        _check_places(taps, inject, len(self.decoder.layers))
        self.memories.append(self._new_memory(taps, inject))
        self.taps.append(list(taps))
        self.inject.append(inject)
        self.register_hooks()

    def add_lora(self, rank: int) -> None:
        """Low-rank updates of the attention of the backbone, which change nothing at first; see :func:`adapt`."""
        check_lora(self.backbone, rank)
        add_lora(self.decoder, rank)
        self.lora = rank

    @property
    def updates(self) -> dict[str, nn.Parameter]:
        """The low-rank updates, by their names in the backbone; empty without ``lora``."""
        return {} if self.lora is None else lora_weights(self.backbone)

    def register_hooks(self) -> None:
        """Listens to the layers of ``taps`` and speaks at those of ``inject``, which may have changed."""
        for hook in self._hooks:
            hook.remove()
        layers = self.decoder.layers
        self._hooks = [
            layers[tap].register_forward_pre_hook(_Tap(tap), with_kwargs=True)
            for tap in sorted({tap for each in self.taps for tap in each})
        ]
        for where in sorted({where for where in self.inject if isinstance(where, int)}):
            self._hooks.append(layers[where - 1].register_forward_hook(_Inject(self, where), with_kwargs=True))

    @property
    def widest(self) -> int:
        """The window that is full attention, or as much of it as the model has."""
        own = _own_window(self.config)
        return EVERY if own is None else own

    @property
    def decoder(self) -> Any:
        """The part of the backbone that has the layers."""
        return self._decoder[0]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Writes memories and low-rank updates, with the model by name, see :func:`titans.adapters.save_adapter`."""
        from titans.adapters.saving import save_adapter  # which knows this class

        save_adapter(self, Path(save_directory))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """What :meth:`save_pretrained` wrote; ``model`` if the one it belongs to is at hand."""
        from titans.adapters.saving import load_adapter

        return load_adapter(pretrained_model_name_or_path, *args, **kwargs)[0]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        """Of the backbone."""
        return self.backbone.get_input_embeddings()

    @property
    def embedding(self) -> Tensor:
        """(vocabulary, width), the vectors of the backbone's tokens."""
        return next(self.get_input_embeddings().parameters())

    def get_output_embeddings(self) -> nn.Module:
        """Of the backbone."""
        return self.backbone.get_output_embeddings()

    def train(self, mode: bool = True) -> AdaptedModel:
        """Sets the memories; the backbone stays in evaluation, also where its low-rank updates are trained."""
        super().train(mode)
        self.backbone.eval()
        return self

    def new_cache(self) -> AdaptedCache:
        """The cache of a sequence that begins."""
        return AdaptedCache(len(self.decoder.layers), self.window, self.sinks, len(self.memories))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: AdaptedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        use_memory: bool = True,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Reads tokens and says what comes next, in blocks: any split of a text gives the same.

        Args:
            input_ids: (batch, time); or inputs_embeds (batch, time, width).
            attention_mask: (batch, time), or longer where a cache has seen tokens before; 0 for padding, anywhere.
            past_key_values: what went before, changed by the call.
            labels: (batch, time), the tokens themselves; -100 where none is wanted.
            logits_to_keep: how many logits to return, counted from the end, or which; 0: all of them.
            use_memory: False: as if there were no memories.
        """
        kwargs.pop("position_ids", None)  # follow from the mask
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("expected either input_ids or inputs_embeds, and not both")
        cache = self.new_cache() if past_key_values is None else past_key_values
        if not isinstance(cache, AdaptedCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; expected the cache of an adapted model")
        batch, time = given.shape[:2]
        if time == 0:
            raise ValueError("the text has no tokens; expected at least one")
        mask = self._mask(attention_mask, batch, time)
        parts = []
        for begin in range(0, time, BLOCK):
            piece = slice(begin, begin + BLOCK)
            name = "input_ids" if inputs_embeds is None else "inputs_embeds"
            parts.append(self._read({name: given[:, piece]}, mask[:, piece], cache, use_memory))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(torch.cat([hidden for hidden, _ in parts], dim=1)[:, kept])
        for index in parts[0][1]:
            y, gate = (torch.cat(each, dim=-2) for each in zip(*(said[index] for _, said in parts), strict=True))
            logits = logits + self.memory_logits(index, y[:, :, kept], gate[:, kept]).to(logits.dtype)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        wants_cache = not self.training if use_cache is None else use_cache
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if wants_cache else None)

    @staticmethod
    def _mask(attention_mask: Tensor | None, batch: int, time: int) -> Tensor:
        if attention_mask is None:
            return torch.ones(batch, time, dtype=torch.bool)
        if attention_mask.ndim != 2 or len(attention_mask) != batch or attention_mask.shape[1] < time:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, time) = {(batch, time)}"
            )
        return attention_mask[:, attention_mask.shape[1] - time :].to(torch.bool)

    def memory_logits(self, index: int, y: Tensor, gate: Tensor) -> Tensor:
        """What a memory that writes at the head adds to the logits, see :meth:`TapMemory.logits`."""
        memory = self.memories[index]
        assert isinstance(memory, TapMemory)
        return memory.logits(y, gate, self.embedding)

    def _read(
        self, given: Mapping[str, Tensor], mask: Tensor, cache: AdaptedCache, use_memory: bool
    ) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """One block: the last hidden states (batch, time, width), and what memories say to the head."""
        device = self.device
        new, positions = cache.place(mask.to(device))
        frequencies = self.decoder.rotary_emb.inv_freq
        view = make_view(new, positions, cache.window, cache.sinks, frequencies)
        full = bool(mask.all())
        call = Call(view, None if full else mask.to(device), list(cache.memories), use_memory)
        output = self.decoder(
            **given,
            attention_mask=view.mask,
            position_ids=new.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            view=call,
        )
        cache.cut(new, positions)
        for index, where in enumerate(self.inject if use_memory else ()):
            if where == HEAD:
                memory, x = self._memory_input(call, index)
                y, call.states[index] = memory.write(x, call.states[index] or memory.init_state(len(x)), call.mask)
                call.said[index] = y, memory.output_gate(x)
        cache.memories = call.states
        return output.last_hidden_state, call.said

    def _memory_input(self, call: Call, index: int) -> tuple[TapMemory, Tensor]:
        memory = self.memories[index]
        assert isinstance(memory, TapMemory)
        return memory, memory.standardise(torch.stack([call.taps[tap] for tap in self.taps[index]], dim=-2))

    def read_memories(self, call: Call, where: int) -> Tensor | None:
        """What the memories that write at a layer say to the tokens of a call; None: nothing."""
        total = None
        for index in range(len(self.memories)):
            if self.inject[index] != where:
                continue
            memory, x = self._memory_input(call, index)
            y, call.states[index] = memory(x, call.states[index], call.mask)
            total = y if total is None else total + y
        return total


def taps_at(shares: Sequence[float], count: int) -> list[int]:
    """The embedding and the layers at these shares of all, for :func:`adapt`."""
    return sorted({0, *(min(count - 1, max(1, round(share * count))) for share in shares)})


def _check_places(taps: Sequence[int], inject: int | str, count: int) -> None:
    """Raises a ``ValueError`` for a memory that listens or speaks where a model of ``count`` layers has nothing."""
    if inject != HEAD and not (isinstance(inject, int) and 1 <= inject <= count):
        raise ValueError(f"inject is {inject}; expected {HEAD}, or a layer from 1 to {count}")
    last = count - 1 if isinstance(inject, str) else inject - 1
    if not taps or not all(0 <= tap <= last for tap in taps):
        raise ValueError(f"taps is {list(taps)}; expected numbers from 0, the embedding, to {last}, below inject")
    if inject == HEAD and taps[0] != 0:
        raise ValueError(f"taps is {list(taps)}; expected 0 first, the embedding, of which values are made")


def _own_window(config: Any) -> int | None:
    """The window that a model has by itself; None: it sees everything."""
    own: int | None = getattr(config, "sliding_window", None)
    return own if getattr(config, "use_sliding_window", True) else None


class _Tap:
    """Notes the states that a layer is given."""

    def __init__(self, tap: int) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = kwargs.get("view")
        if isinstance(call, Call) and call.use_memory:
            call.taps[self.tap] = args[0] if args else kwargs["hidden_states"]


class _Inject:
    """Adds what the memories say to the states that a layer returns."""

    def __init__(self, model: AdaptedModel, where: int) -> None:
        self.model, self.where = [model], where  # in a list: the model is not a part of this

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = kwargs.get("view")
        if not isinstance(call, Call) or not call.use_memory:
            return output
        y = self.model[0].read_memories(call, self.where)
        if y is None:
            return output
        if isinstance(output, tuple):
            return (output[0] + y.to(output[0].dtype), *output[1:])
        return output + y.to(output.dtype)


def adapt(
    model: PreTrainedModel,
    taps: Sequence[int] | Sequence[Sequence[int]] | None = None,
    inject: int | str | Sequence[int | str] = HEAD,
    window: int = 256,
    sinks: int = 4,
    lora: int | None = None,
    **memory: Any,
) -> AdaptedModel:
    """Gives a causal model of transformers a window of attention, and a memory of what left it.

    The model is taken over: its weights are frozen, and its attention becomes the window's. The memory starts silent;
    ``titans adapt calibrate`` and ``titans adapt fit`` teach it.

    Args:
        model: of a family with standard attention: Llama, Mistral, Qwen, SmolLM.
        taps: which hidden states the memory reads, 0 for the embedding, i for what layer i returns, counted from 1; one
            list per memory for several. Default: the embedding and the states after a fifth and two fifths of the
            layers, which tell what a token follows.
        inject: where the memory speaks; one per memory. ``"head"``: it adds to the logits; or the layer to whose output
            it adds.
        window: how many tokens attention sees, the present one included.
        sinks: how many of the first tokens it sees besides.
        lora: the rank of updates of the model's attention, which are trained together with the memory; None: the model
            stays as it is. Needs the package peft.
        memory: settings of :class:`titans.adapters.memory.TapMemory`, ``features`` and ``threshold`` among them.
    """
    decoder = decoder_of(model)
    layers = len(decoder.layers)
    several: list[list[int]]
    if taps is None:
        several = [taps_at(KEYS, layers)]
    elif all(isinstance(tap, int) for tap in taps):
        several = [list(taps)]  # type: ignore[arg-type]
    else:
        several = [list(each) for each in taps]  # type: ignore[arg-type]
    where = [inject] * len(several) if isinstance(inject, int | str) else list(inject)
    if len(where) != len(several):
        raise ValueError(f"inject has {len(where)} layers and taps are {len(several)}; expected one for each memory")
    return AdaptedModel(model, decoder, window, sinks, several, where, memory, lora)
