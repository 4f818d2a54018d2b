"""Sizes of a model, and what follows from them by counting. No torch here."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Sizes of one model. All are counts; ``theta`` is the RoPE base.

    Raises:
        ValueError: a size is not positive (``shared_experts`` may be 0), ``heads`` is no multiple
            of ``kv_heads``, or ``top_k`` exceeds ``experts``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_hidden: int
    shared_experts: int
    vocab: int
    max_seq_len: int
    theta: float = 1_000_000.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            least = 0 if name == "shared_experts" else 1
            if getattr(self, name) < least:
                raise ValueError(
                    f"MoEShape.{name} must be at least {least}, got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"MoEShape.heads must be a multiple of kv_heads, got {self.heads}, {self.kv_heads}"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"MoEShape.top_k must not exceed experts, got {self.top_k} of {self.experts}"
            )

    @property
    def attention_params(self) -> int:
        """Query, key, value and output projections of one layer."""
        heads = 2 * self.heads + 2 * self.kv_heads
        return self.hidden * self.head_dim * heads

    @property
    def expert_params(self) -> int:
        """One expert: gate, up and down projections (SwiGLU)."""
        return 3 * self.hidden * self.expert_hidden

    @property
    def router_params(self) -> int:
        return self.hidden * self.experts

    @property
    def dense_layer_params(self) -> int:
        """One layer without its routed experts: attention, shared experts, router, two norms."""
        return (
            self.attention_params
            + self.shared_experts * self.expert_params
            + self.router_params
            + 2 * self.hidden
        )

    @property
    def embedding_params(self) -> int:
        """The token embedding; the output head, untied, has as many."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters of the model."""
        layer = self.dense_layer_params + self.experts * self.expert_params
        return self.layers * layer + 2 * self.embedding_params + self.hidden

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts it is not routed to."""
        return self.params - self.layers * (self.experts - self.top_k) * self.expert_params

    @property
    def muon_params(self) -> int:
        """Parameters under Muon: the matrices of the layers, without the routers."""
        layer = self.attention_params + (self.experts + self.shared_experts) * self.expert_params
        return self.layers * layer

    def cut(self, **sizes: int | None) -> "MoEShape":
        """Return the same layer with other sizes, as fewer layers or experts; None keeps one."""
        return replace(self, **{name: n for name, n in sizes.items() if n is not None})
