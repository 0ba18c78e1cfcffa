"""Report what was tried on an engine, and an input on which it is wrong."""

from pydantic import BaseModel

from enginesmith.pipeline.units import AddedOption

SAMPLES = "samples"
"""Family of the samples as they are."""


class Finding(BaseModel, frozen=True):
    """Describe an input on which an engine is wrong, and what is guilty."""

    walk: str
    """Family of the input: ``sizes``, ``values`` …"""
    note: str
    reason: str
    ties: str = ""
    """Difference, where it is a choice among exactly equal numbers alone; empty otherwise."""
    witness: str
    """Source of the right answer: ``model``, ``graph``, or itself on one sample ``alone``."""
    attempts: int
    """Inputs that were tried, this one included."""
    guilty: str
    """The stage that made the answer wrong: ``export``, ``simplify``, a precision, ``engine``."""
    nodes: tuple[str, ...] = ()
    """Operators and names of the nodes that the graph was reduced to."""
    whole: int | None = None
    """Nodes of the graph that was reduced."""
    workaround: str = ""
    """An option with which the engine answers right, as people give it; empty if none was found."""
    option: AddedOption | None = None
    """The workaround as a change of the recipe."""
    software: str = ""
    """Software that gives the wrong answer, with its version: ``ONNX Runtime 1.31.1``."""
    reference: str = ""
    """Way in which the right answer was computed."""
    right_on: dict[str, tuple[str, ...]] = {}
    """Inputs that were answered right before, by family; of each, at most the first eight."""
    elsewhere: dict[str, bool] = {}
    """Other inputs of the reduced graph, and True where the engine is wrong on them, too."""
    versions: dict[str, str] = {}
    unreduced: str = ""
    """Reason why the graph was not reduced."""

    @property
    def fault(self) -> str:
        """The input and what is wrong on it."""
        ties = f": {self.ties}" if self.ties else ""
        return f"wrong on {self.walk} ({self.note}): {self.reason}{ties}"

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        reduced = f", in {len(self.nodes)} of {self.whole} nodes ({', '.join(self.nodes[:3])})" if self.nodes else ""
        mended = f"; right with {self.workaround}" if self.workaround else ""
        return f"{self.fault}; guilty: {self.guilty}{reduced}{mended}"


class Excuse(BaseModel, frozen=True):
    """Describe an input whose answer differs by more than the thresholds, but no further than rounding explains."""

    walk: str
    """Family of the input: ``sizes``, ``values`` …"""
    note: str
    reason: str
    """The difference, and what rounding alone does."""


class Prosecution(BaseModel, frozen=True):
    """Report what was tried on an engine, and what was found."""

    seconds: float
    """Time for trying inputs."""
    attempts: int
    walks: dict[str, int]
    """Inputs by family."""
    finding: Finding | None = None
    excused: int = 0
    """Inputs whose answers differ by more than the thresholds, but no further than rounding explains."""
    excuses: tuple[Excuse, ...] = ()
    """Of those, the first eight."""
    reason: str = ""
    """Reason why no input was tried, or no further one."""
    cut: bool = False
    """True where the time that was left was too short for it: more may be found in more time."""

    @property
    def beside_samples(self) -> int:
        """Inputs that were tried and are no samples."""
        return self.attempts - self.walks.get(SAMPLES, 0)

    @property
    def caution(self) -> str:
        """Say how many inputs were excused, with the first of them; nothing where none was."""
        if not self.excuses:
            return ""
        first = self.excuses[0]
        return (
            f"on {self.excused} of {self.attempts} inputs, answers differ by more than the threshold, but no further "
            f"than rounding explains, as on {first.walk} ({first.note}): {first.reason}"
        )
