"""Hugging Face models: the class that a configuration names, with all of its weights."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.torch.hugging_face_inputs import FACTORY, find_text_config
from enginesmith.pipeline.units import name_some

_LISTED = 5


def load_model(transformers: Any, target: str) -> tuple[nn.Module, list[str], list[str]]:
    """Load the model of a hub name (``org/name@revision``) or folder, as the class its configuration names.

    Weights are read from safetensors, or from what ``torch.load(weights_only=True)`` accepts; code that comes with
    a model is never run. Returns also the names of weights that are drawn at random, as no file holds them; and notes.

    Raises:
        SourceError: the library has no such class.
    """
    name, _, revision = target.partition("@")
    options = {"revision": revision} if revision else {}
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    config.use_cache = False
    notes, named = list[str](), (getattr(config, "architectures", None) or [""])[0]
    if not named:
        notes.append("its config.json names no class (architectures): AutoModel was taken, which has no head")
    model_class = getattr(transformers, named or "AutoModel", None)
    if model_class is None:
        own = hasattr(config, "auto_map")
        raise SourceError(
            f"its config.json names the class {named}, which transformers {transformers.__version__} does not have",
            f"code that comes with a model is not run: write {FACTORY}"
            if own
            else f"install a version of transformers that has it, or write {FACTORY}",
        )
    module, report = model_class.from_pretrained(
        name, config=config, dtype="float32", output_loading_info=True, **options
    )
    if surplus := sorted(report["unexpected_keys"]):
        notes.append(f"weights that {type(module).__name__} does not have were left out: {name_some(surplus, _LISTED)}")
    notes += describe_tags(name_classes(config)) if named.endswith("ForTokenClassification") else []
    return module, sorted(report["missing_keys"]), notes


def name_classes(config: Any) -> tuple[str, ...]:
    """Name the classes by number, as a configuration's id2label does; empty where that is LABEL_0, LABEL_1, …."""
    names = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    by_number = tuple(names.get(number, "") for number in range(len(names)))
    chosen = all(by_number) and by_number != tuple(f"LABEL_{number}" for number in range(len(names)))
    return by_number if chosen else ()


def describe_tags(tags: Sequence[str]) -> list[str]:
    """Describe that tags of entities, by number, are in another order than the metric of entities takes them to be."""
    if not tags or not all(tag == "O" or tag[:2] in ("B-", "I-") for tag in tags):
        return []
    types = [tag[2:] for tag in tags[1::2]]
    if [*tags] == ["O", *(f"{place}-{name}" for name in types for place in "BI")]:
        return []
    return [
        f"its tags are {', '.join(tags)}, and --metric entity_f1 reads their numbers as O, and B and I of each type by "
        "turns: put outputs and labels into that order, or write a metric of your own"
    ]


def check_missing(module: nn.Module, example: Mapping[str, Tensor], missing: Collection[str]) -> list[str]:
    """Check that no output depends on weights that no file holds; return a note on those that are there for training.

    They are set to other numbers, and the answers to the example are compared.

    Raises:
        SourceError: an output changes, or the model does not run on the example.
    """
    stored = module.state_dict(keep_vars=True)
    drawn = [stored[name] for name in missing if name in stored and stored[name].is_floating_point()]
    if not drawn:
        return []
    named, changed = f"{type(module).__name__}: {name_some(sorted(missing), _LISTED)}", ["the answers"]
    copies = [value.detach().clone() for value in drawn]
    with contextlib.suppress(Exception), torch.no_grad():  # it may not run without inputs that only the user knows
        before = _answer(module, example)
        try:
            for value in drawn:
                value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
            after = _answer(module, example)
        finally:
            for value, old in zip(drawn, copies, strict=True):
                value.copy_(old)
        changed = [key for key in before if not all(map(torch.equal, before[key], after[key]))]
    if changed:
        raise SourceError(
            f"no file holds these weights of {named}; they are drawn at random, and so would be {', '.join(changed)}",
            "give a folder with all weights of the class that its config.json names (architectures), name another "
            f"class there, or write {FACTORY}",
        )
    return [f"no file holds these weights of {named}; no output depends on them"]


def _answer(module: nn.Module, example: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    leaves = {name: _pytree.tree_leaves(value) for name, value in module(**example).items()}
    return {name: [leaf for leaf in parts if isinstance(leaf, Tensor)] for name, parts in leaves.items()}


def check_callable(module: nn.Module) -> None:
    """Check that a model can be called: some are only for ``generate``, which calls their parts in turn.

    Raises:
        SourceError: it cannot.
    """
    if type(module).forward is nn.Module.forward:
        parts = [name for name, part in module.named_children() if type(part).forward is not nn.Module.forward]
        raise SourceError(
            f"{type(module).__name__} has no forward, so that it cannot be called as a module",
            f"give one of its parts ({name_some(parts, _LISTED)}) with its inputs: write {FACTORY}",
        )


def advise(module: nn.Module) -> str:
    """Write what to do where a model does not run, if its configuration lacks what it needs; else nothing."""
    judges = type(module).__name__.endswith("ForSequenceClassification")
    if not judges or getattr(find_text_config(module.config), "pad_token_id", None) is not None:
        return ""
    return (
        "without a pad_token_id, it takes one text at a time: set it in config.json, to the number of the token that "
        "fills up shorter texts; or fix the batch, with --input input_ids:int64:1,sequence"
    )


def advise_random(module: nn.Module) -> str:
    """Write what to do where a model answers at random: it adds noise, or drops numbers in evaluation mode, too."""
    rates = {name: rate for name, rate in vars(module.config).items() if isinstance(rate, float) and rate > 0}
    named = sorted(
        (name for name in rates if "noise" in name or "dropout" in name), key=lambda name: "noise" not in name
    )
    if not named:
        return ""
    return (
        f"set what is random to 0.0 in its config.json: {', '.join(named)}; or, where it draws numbers otherwise, "
        f"write {FACTORY}, in which that is taken out"
    )
