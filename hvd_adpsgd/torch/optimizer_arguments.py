"""Arguments of DistributedOptimizer: checks that need no message, and the AveragingSpec made of them."""

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch

from hvd_adpsgd import strategies
from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import (
    ConfigError,
    InnerOnlyError,
    ModelMismatchError,
    StrategyMismatchError,
    UnsupportedOptimizerError,
)
from hvd_adpsgd.inner import backend, horovod
from hvd_adpsgd.inner.over_torch.refused import refuse
from hvd_adpsgd.launch.torch_group import are_inside, is_inside
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.torch.basics import global_process_set, require_sets
from hvd_adpsgd.training.optimizer_state import require_shareable
from hvd_adpsgd.training.parameters import AveragingSpec, statistics
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.sharded import is_sharded, require_whole_shards
from hvd_adpsgd.training.shared_moments import SHARED, Adaptive, shareable
from hvd_adpsgd.training.shared_momentum import Momentum, unshareable
from hvd_adpsgd.training.supported import (
    averages_gradients,
    require_fit,
    require_models,
    require_supported,
)

log = logging.getLogger("hvd_adpsgd")

NamedTensors = Iterable[tuple[str, torch.Tensor]]


_OPS = {horovod.Average: "Average", horovod.Sum: "Sum", horovod.Adasum: "Adasum"}


def make_spec(
    world: World,
    optimizer: torch.optim.Optimizer,
    averaging: Strategy | str | None,
    given: dict[str, Any],
    inner: dict[str, Any],
    process_set: Any,
    named: list[tuple[str, torch.Tensor]] | None,
    buffers: torch.nn.Module | NamedTensors | None,
    average_gradients: bool | None = None,
) -> AveragingSpec:
    """Check the arguments of this learner's DistributedOptimizer call, and return their AveragingSpec."""
    require_supported(optimizer)
    require_shareable(optimizer)
    _require_named("named_parameters", named)
    strategy = _strategy(averaging, world.config.averaging)
    _require_joinable(strategy, world)
    _require_first_if_synchronous(strategy, world)
    if not world.is_plain and strategy.averages != "nothing":
        require_models(optimizer, named)
    names = _names(optimizer, named)
    trained = trained_tensors(names, optimizer.param_groups)
    sizes = list(map(len, world.groups))
    is_cut = require_whole_shards(trained, sizes, functools.partial(are_inside, world))
    if is_cut and average_gradients:
        raise ModelMismatchError(
            "average_gradients=True, and the optimizer's parameters are sharded: fully_shard averages their "
            "gradients. Leave the argument out."
        )
    asked = False if is_cut else average_gradients
    averages = averages_gradients(optimizer, asked, functools.partial(is_inside, world))
    if not averages:
        _require_averaged(strategy, inner["op"], world)
    if is_cut:
        _require_shardable(strategy, buffers, world)
    config: Config = world.config.replace(**{k: v for k, v in given.items() if v is not None})
    if strategy.averages != "nothing":
        inner_process_set(process_set, world)
    _require_wire(strategy, config, world)
    _require_pairs(strategy, config, world)
    if buffers is not None:
        strategy.refuse("buffers=")
    if inner["op"] == horovod.Adasum:
        strategy.refuse("op=Adasum")
        if backend() == "torch":
            refuse("op=hvd.Adasum")
    moments = None if world.is_plain else _moments(optimizer, strategy, config, world)
    compared = {
        "optimizer": type(optimizer),
        "averaging": strategy.spec(),
        **{name: getattr(config, name) for name in given},
        **inner,
        "op": _OPS.get(inner["op"], inner["op"]),
        # what a default means on this learner is compared, too
        "average_gradients": averages,
        "moments": f"{config.moments} ({'own' if moments is None else 'shared'})",
    }
    arguments = [f"{name}={_as_text(value, names)}" for name, value in compared.items()]
    tensors = trained, _floating(buffers)
    return AveragingSpec(strategy, config, *tensors, arguments, moments, averages, is_cut)


def require_same_kind(world: World, spec: AveragingSpec, group: dict[str, Any]) -> None:
    """Raise ModelMismatchError if a param_group to be added is not sharded as the optimizer's are."""
    given = group["params"]  # it may be readable only once
    group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
    named = [(f"added {i}", p) for i, p in enumerate(group["params"])]
    require_fit("add_param_group: parameter {}", group["params"])
    sizes = list(map(len, world.groups))
    is_cut = require_whole_shards(named, sizes, functools.partial(are_inside, world))
    if named and is_cut != spec.is_sharded:
        raise ModelMismatchError(
            f"add_param_group: its tensors are {'' if is_cut else 'not '}sharded, those of the optimizer "
            f"{'are not' if is_cut else 'are'}. Use an optimizer of its own for each kind."
        )


def require_shareable_moments(
    spec: AveragingSpec,
    optimizer: torch.optim.Optimizer,
    groups: Iterable[dict[str, Any]],
    doing: str,
) -> None:
    """Raise UnsupportedOptimizerError if moments of new param_groups cannot be shared as the others are."""
    for group in groups if spec.moments is not None else ():
        if reason := unshareable({**optimizer.defaults, **group}):
            raise UnsupportedOptimizerError(
                f"{doing}: a param_group {reason}, and super learners share the moments of this "
                f'{type(optimizer).__name__}. Leave that out, or wrap the optimizer with moments="own".'
            )


def _require_shardable(strategy: Strategy, buffers: Any, world: World) -> None:
    """Raise ConfigError where what is asked for does not fit a model of which each learner holds a part."""
    if world.super_size > 1 and not strategy.is_gossip:
        problem = f"averaging={strategy.spec()} is more than gossip, of whole models"
        cure = "use random_pairs, fixed_ring or random_ring"
    elif buffers is not None:
        problem, cure = "buffers= are the leader's", "leave buffers out"
    else:
        return
    raise ConfigError(
        f"the model is sharded inside the super learner, and {problem}. Use a plain model, or {cure}."
    )


def _require_averaged(strategy: Strategy, op: Any, world: World) -> None:
    """Raise ConfigError where gradients that the script averages do not fit the strategy or the reduction."""
    plan = strategy.plan(world.super_rank, world.super_size)
    if op == horovod.Adasum:
        problem, cure = "op=Adasum takes the place of their average", "leave op out"
    elif world.super_size > 1 and strategy.averages == "nothing":
        problem = f"averaging={strategy.spec()} joins {world.super_size} super learners"
        cure = f"set HVD_ADPSGD_AVERAGING={strategy.spec()} before hvd.init()"
    elif world.super_size > 1 and plan.in_step is not None:
        problem = f"averaging={strategy.spec()} has rounds, to which a skipped step belongs, too"
        cure = "use random_pairs, fixed_ring or random_ring"
    else:
        return
    raise ConfigError(
        "the script averages gradients in the super learner (DistributedDataParallel, or "
        f"average_gradients=False), and {problem}. Let the library average them, or {cure}."
    )


def _moments(
    optimizer: torch.optim.Optimizer, strategy: Strategy, config: Config, world: World
) -> Adaptive | Momentum | None:
    """Return the moments that super learners share; None if each has its own.

    Raises:
        ConfigError: if they are to be shared, and cannot be.
    """
    if config.moments == "own":
        return None
    found = shareable(optimizer)
    if not strategy.is_gossip:
        found = f"averaging={strategy.spec()} is more than gossip"
    if not isinstance(found, str):
        return found
    if config.moments == "shared":
        raise ConfigError(
            f"moments=shared: {found}, so moments cannot be shared. Leave moments out, or use one of torch's "
            f"{SHARED}, in float32, with random_pairs or a ring."
        )
    if world.rank > 0 or not strategy.is_gossip:
        return None
    # Schedule-Free optimizers have these methods, which replace the parameters by their average and back
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        log.warning(
            "%s keeps a second copy of the parameters in its state, which super learners do not average: "
            "losses are higher than with one super learner. Use a torch optimizer with a learning-rate "
            "schedule, or run one super learner; moments=own silences this line.",
            type(optimizer).__name__,
        )
    elif any("betas" in group for group in optimizer.param_groups):
        log.warning(
            "moments are not shared by super learners: %s. Steps are smaller than in synchronous training "
            "where gradients are noisy. Use torch's Adam or AdamW in float32, or name its momentum in "
            "momentum_keys(group); moments=own silences this.",
            found,
        )
    return None


def _as_text(value: Any, names: dict[torch.Tensor, str]) -> str:
    """Return an argument of DistributedOptimizer as text, which learners compare with each other."""
    if isinstance(value, torch.Tensor):
        return names.get(value, "a tensor that is not a parameter")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_as_text(each, names) for each in value)}]"
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, (int, float)):
        return repr(float(value)).removesuffix(".0")
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__


def listed(pairs: Any) -> Any:
    """Return an iterable as a list, since it may be readable only once; any other value unchanged."""
    return list(pairs) if isinstance(pairs, Iterable) else pairs


def _require_named(argument: str, pairs: Any) -> None:
    """Raise ConfigError unless `pairs` is None or a list of (name, tensor)."""
    if pairs is None:
        return
    odd = next((p for p in pairs if not _is_named(p)), None) if isinstance(pairs, list) else pairs
    if odd is not None:
        raise ConfigError(
            f"{argument} got a {type(odd).__name__}, allowed are pairs (name, tensor). Pass "
            f"model.named_{argument.removeprefix('named_')}()."
        )


def _is_named(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)


def _require_wire(strategy: Strategy, config: Config, world: World) -> None:
    """Raise ConfigError if wire_dtype is set where it has no meaning.

    It has none with a mean of all models, which is summed in full precision; "auto" none with a given share.
    """
    if config.chooses_bits and not config.chooses_share:
        too = ', or exchange_share="auto" too' if strategy.is_gossip else ""
        raise ConfigError(
            f"wire_dtype=auto with exchange_share={config.exchange_share}: bits are chosen together with "
            f'the share. Use wire_dtype="int8"{too}.'
        )
    plan = strategy.plan(world.super_rank, world.super_size)
    if plan.averages_all and plan.width == 0 and config.wire_dtype is not None:
        raise ConfigError(
            f"wire_dtype={config.wire_dtype} with averaging={strategy.spec()}: the mean of all is summed "
            "in full precision. Leave wire_dtype out, or use a strategy of pairs."
        )


def _require_joinable(strategy: Strategy, world: World) -> None:
    """Raise StrategyMismatchError if super learners may join the job, but not with this strategy."""
    if world.config.join_secret_file is None:
        return
    if strategy.averages == "nothing" or (world.super_size == 1 and not strategy.is_gossip):
        raise StrategyMismatchError(
            f"averaging={strategy.spec()} with HVD_ADPSGD_JOIN_SECRET_FILE and "
            f"super_size()={world.super_size}: others cannot join this job. Use random_pairs, fixed_ring or "
            "random_ring, or leave the file out."
        )


def _require_first_if_synchronous(strategy: Strategy, world: World) -> None:
    """Raise StrategyMismatchError if an optimizer averages between super learners that are to be joined.

    One learner may hold an optimizer that others have dropped: so this is checked before learners agree.
    """
    if strategy.averages == "nothing" and world.super_size > 1 and live():
        raise StrategyMismatchError(
            "averaging=synchronous joins all learners into one super learner, but an optimizer is "
            "already averaged between super learners. Use one strategy for all optimizers."
        )


def _require_pairs(strategy: Strategy, config: Config, world: World) -> None:
    """Raise ConfigError if exchange_share is set for a strategy whose exchanges need whole models."""
    plan = strategy.plan(world.super_rank, world.super_size)
    if world.super_size == 1 or strategy.averages == "nothing":
        return
    if config.chooses_share and not strategy.is_gossip:
        raise ConfigError(
            f"exchange_share=auto with averaging={strategy.spec()}, which is more than gossip. Leave "
            "exchange_share out, or use random_pairs, fixed_ring or random_ring."
        )
    if plan.averages_all and plan.width == 0 and config.first_share < 1:
        raise ConfigError(
            f"exchange_share={config.exchange_share:g} with averaging={strategy.spec()}: a mean of "
            "all is one of whole models. Leave exchange_share out, or use a strategy of pairs."
        )


def _names(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the names of the parameters, as Horovod will name them."""
    names = {
        p: f"allreduce.noname.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    }
    if named is not None and all(isinstance(pair, tuple) for pair in named):
        names.update({p: name for name, p in sorted(named, key=lambda pair: pair[0])})
    return names


def _strategy(averaging: Strategy | str | None, default: str) -> Strategy:
    if isinstance(averaging, Strategy):
        return averaging
    if averaging is not None and not isinstance(averaging, str):
        raise ConfigError(
            f"averaging={averaging!r}: allowed are a strategy and its name. Pass hvd.RandomPairs() or "
            '"random_pairs", for instance.'
        )
    return strategies.parse(default if averaging is None else averaging)


def inner_process_set(process_set: Any, world: World) -> Any:
    if process_set is None or process_set is global_process_set:
        return horovod.global_process_set
    if not world.is_plain and process_set is not horovod.global_process_set:
        raise InnerOnlyError(
            f"process_set={process_set} with {world.super_size} super learners: gradients are "
            "averaged in a whole super learner. Leave process_set out, pass hvd.super_learner, or "
            "run one super learner."
        )
    return require_sets(process_set, "hvd.DistributedOptimizer")


def _floating(buffers: torch.nn.Module | NamedTensors | None) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of the floating-point buffers in argument `buffers`, which can be averaged."""
    if buffers is None:
        return []
    if isinstance(buffers, torch.nn.Module):
        buffers = [(name, b) for name, b in statistics(buffers) if _is_finite(name, b)]
    pairs = listed(buffers)
    _require_named("buffers", pairs)
    require_fit("buffers=: tensor {}", [b for _, b in pairs if b.is_floating_point()])
    cut = next((name for name, b in pairs if is_sharded(b)), None)
    if cut is not None:
        raise ModelMismatchError(
            f"buffers= has {cut!r}, a DTensor, and the leader's buffers are averaged. Leave it out."
        )
    return [(f"buffer.{name}", b) for name, b in pairs if b.is_floating_point()]


def _is_finite(name: str, buffer: torch.Tensor) -> bool:
    if buffer.is_meta or bool(torch.isfinite(buffer).all()):
        return True
    log.info("buffers= has %r, which holds NaN or Inf, as a mask does: it is not averaged.", name)
    return False


def trained_tensors(
    names: dict[torch.Tensor, str], groups: Iterable[dict[str, Any]]
) -> list[tuple[str, torch.Tensor]]:
    return [(names[p], p) for group in groups for p in group["params"] if p.requires_grad]
