"""Parts of a plan made once more for a changed model: the same steps under other names, on other artifacts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginesmith.pipeline.steps import Step, Variant


@dataclass(frozen=True)
class Branch:
    """How the steps of a changed model differ from those of the given one."""

    suffix: str
    """What ids of its steps and variants end with, as in ``-prune30``."""
    stands_for: Mapping[str, str]
    """Steps that it has others in the place of: the model, and what that answers."""
    shared: Collection[str] = ()
    """Steps that are the same ones in both."""

    def name(self, step: str) -> str:
        """What a step is called here."""
        return self.stands_for.get(step) or (step if step in self.shared else f"{step}{self.suffix}")

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that are made once more."""
        return [
            replace(
                step,
                id=self.name(step.id),
                inputs={role: self.name(name) for role, name in step.inputs.items()},
                optional_inputs={role: self.name(name) for role, name in step.optional_inputs.items()},
            )
            for step in steps
            if step.id not in self.stands_for and step.id not in self.shared
        ]

    def variant(self, variant: Variant) -> Variant:
        """The variant that differs from the given one in nothing but the model."""
        own: dict[str, Any] = {
            name: self.name(step)
            for name in ("calibration", "assignment", "quality", "memory", "work", "profile")
            if (step := getattr(variant, name))
        }
        own |= {
            name: tuple(self.name(step) for step in getattr(variant, name)) for name in ("verified", "search", "audits")
        }
        return replace(
            variant,
            id=f"{variant.id}{self.suffix}",
            artifact=self.name(variant.artifact),
            dense=variant.dense or variant.id,
            **own,
        )
