"""Declare the contract of engines, which load artifacts and answer feeds. An engine never times or measures itself."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.profiling import WARM_CALLS, Profiled, ProfileRequest
from enginesmith.pipeline.engines.triton import TritonBackend
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.passes.quantize.precisions import Placement, Quantizer
from enginesmith.pipeline.system.device import DEVICE_KINDS, Availability, Device
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.compatibility import Check
    from enginesmith.pipeline.engines.options import EngineOptions
    from enginesmith.pipeline.system.software import Formats, Stack
    from enginesmith.pipeline.units import AddedOption


UNKNOWN_OPERATOR = (
    "take another engine, update {}, or leave that operator out; a PyTorch model may also be exported with another "
    "opset (--opset)"
)
"""Remedy where an engine's package does not know an operator, or not in this form."""
TUNING = "tuning.json"
"""File beside an engine that says with which options it was measured to be the fastest."""


def refuse_closed(*_: Any) -> NoReturn:
    """Stand for what a session ran, once it is closed; raises UsageError."""
    raise UsageError("the session is closed")


class Session(ABC):
    """Run a loaded engine. Use it as a context manager: leaving it frees what it holds.

    A call is ``enqueue(bound)`` and ``synchronize()``; moving data is outside of it, in ``bind`` and ``fetch``.
    """

    signature: Signature
    concurrent: bool = False
    """True if any number of threads may call :meth:`answer` at the same time."""

    @property
    def cuda_stream(self) -> int | None:
        """Handle of the CUDA stream that ``enqueue`` puts its work on; None on the CPU."""
        return None

    @property
    def first_call_note(self) -> str:
        """Work that the first call does besides, or is spared: compiling kernels, say. Empty if none."""
        return ""

    @abstractmethod
    def bind(self, feeds: Feeds) -> Any:
        """Put feeds where the engine reads them; checks nothing (the caller holds them against ``signature``)."""

    @abstractmethod
    def enqueue(self, bound: Any) -> None:
        """Start one inference; may return before it has finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything enqueued has finished."""

    @abstractmethod
    def fetch(self) -> dict[str, Array]:
        """Copy the outputs of the last inference to host arrays, by name; later inferences leave them as they are."""

    @property
    def sibling_note(self) -> str:
        """Costs of a sibling besides its activations and outputs: weights of its own, say. Empty if none."""
        return ""

    @abstractmethod
    def sibling(self) -> "Session":
        """Open another session on the same weights, which can run at the same time as this one.

        It is made, used and closed in the thread that uses it, while this one is open; either may be closed first.

        Raises:
            UsageError: this session is closed.
        """

    def differentiate(self, feeds: Feeds, weights: Feeds) -> dict[str, Array]:
        """Compute the gradient of the outputs' weighted sum by each float input; empty if the engine cannot.

        Shapes are those of the feeds; ``weights`` has an array of an output's shape for each that counts.
        """
        return {}

    def perturb(self, feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        """Answer where each operation's result is changed at random by about ``step`` of it; empty if that cannot be.

        A negative step of the same seed changes them the other way.
        """
        return {}

    def find_choosing(self, feeds: Feeds) -> frozenset[str] | None:
        """Find the outputs whose rows may be chosen by values, as a run on these feeds shows; None where any may be."""
        return frozenset(self.signature.unordered)

    def release_idle_memory(self) -> None:  # noqa: B027 - most engines keep nothing
        """Give back memory that libraries keep for later calls; no session of this process may be running."""

    @abstractmethod
    def close(self) -> None:
        """Free all that no open sibling uses; a call after it raises UsageError, a second close does nothing."""

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one whole inference: feeds in, outputs out.

        Raises:
            SignatureError: the feeds do not fit.
        """
        self.signature.check(feeds)
        outputs = self.answer([feeds[spec.name] for spec in self.signature.inputs])
        return {spec.name: value for spec, value in zip(self.signature.outputs, outputs, strict=True)}

    def warm_up(self, feeds: Feeds) -> Any:
        """Bind feeds, make the calls that do not count, and return what was bound.

        Raises:
            SignatureError: the feeds do not fit.
        """
        self.signature.check(feeds)
        bound = self.bind(feeds)
        for _ in range(WARM_CALLS):
            self.enqueue(bound)
        self.synchronize()
        return bound

    def answer(self, values: Sequence[Array]) -> Sequence[Array]:
        """Run one whole inference of arrays that fit, which nothing checks; both sides in the signature's order.

        Any thread may call it; settings elsewhere in the process neither change the answer nor are changed.
        """
        self.enqueue(self.bind({spec.name: value for spec, value in zip(self.signature.inputs, values, strict=True)}))
        self.synchronize()
        outputs = self.fetch()
        return [outputs[spec.name] for spec in self.signature.outputs]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class BuildRequest:
    """Bundle what an engine is built from, and for."""

    artifact: Artifact
    out: Path
    """An empty folder."""
    device: Device
    ranges: Mapping[str, ShapeRange] = field(default_factory=dict)
    """The sizes that dynamic dimensions may take, or, for engines made from modules, those that somebody asked for."""
    progress: Callable[[str], None] = lambda text: None


class MemoryFigures(BaseModel, frozen=True):
    """List the memory that a builder reports; None where it does not."""

    weights_bytes: int | None = None
    activation_bytes: int | None = None
    """Memory that one inference at the largest shape works in, scratch memory included."""
    scratch_bytes: int | None = None
    build_device_peak_bytes: int | None = None


class EngineFacts(MemoryFigures):
    """Record what a built engine says of itself; None where it does not say."""

    workspace_limit_bytes: int | None = None
    layers: dict[str, int] | None = None
    """Kernels by the precision that they run in."""
    cautions: tuple[str, ...] = ()
    """On which numbers its answers would be wrong, in a sentence each."""


@dataclass(frozen=True)
class Configuration:
    """Describe a way to build and run an engine, which becomes one variant of a run."""

    engine: "Engine"
    precision: str
    """Part of the variant's name: ``int8``, ``tf32``."""
    workspace: str = ""
    """The workspace limit as it was asked for; empty where there is none."""
    target: str | None = None
    mode: str = ""
    """The engine's own word for how it runs or optimizes; empty for what is usual."""


@dataclass(frozen=True)
class EngineFile:
    """Describe a built engine in a file of the user's, by the record beside it."""

    engine: "Engine"
    """Loads it, with no option that a file could allow itself."""
    version: str
    targets: tuple[str, ...]
    """Compute capabilities that it runs on."""
    signature: Signature
    record: dict[str, Any]
    """All that is recorded, as plain values."""
    files: tuple[Path, ...]
    """The engine itself first, then what has to lie beside it."""
    describe: Callable[[], dict[str, Any]] = dict
    """Tells people what is in it, and whether it runs here."""


@dataclass(frozen=True)
class PackageFacts:
    """List what the manifest of a package says of an engine's file."""

    version: str | None = None
    """Version of the package that built it; None for the one that the run recorded."""
    targets: tuple[str, ...] = ()
    """Compute capabilities of the GPUs that it is built for; empty where it is not for certain ones."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Names and values as the engine's own package takes them."""
    module: str = ""
    """Python module to import, if it is not called as the engine is."""


class Engine(BaseModel, ABC, frozen=True, extra="forbid"):
    """Build and load one kind of engine; its fields are the options that it does so with.

    An engine has to say ``name``, ``title``, ``consumes`` and ``tools`` and to define :meth:`available`, :meth:`load`
    and :meth:`prime`, and :meth:`build` unless it runs a module itself. All else has defaults.
    """

    name: ClassVar[str]
    """Its name in recipes and in the table."""
    title: ClassVar[str]
    consumes: ClassVar[Kind]
    """Kind of artifact that it is made from: a ``torch`` module, or an ``onnx`` graph."""
    tools: ClassVar[tuple[str, ...]]
    """Distributions whose versions decide what is built and how it runs; the first one installed is its own."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Fields of the recipe that concern only engines like this one: to give them without one is an error."""
    precisions: ClassVar[tuple[str, ...]] = ()
    """Precisions that it casts a module to by itself; engines of graphs take the precision of the graph."""
    native_code: ClassVar[bool] = False
    """True if its file is machine code: a bundle of it is loaded only where the user says that its maker is trusted."""
    placement: ClassVar[Placement] = "inputs"
    """Rule for the places of Q/DQ pairs in graphs for it."""
    quantizers: ClassVar[tuple[Quantizer, ...]] = ("own", "qat")
    """Makers of static int8 graphs that it runs in int8."""
    casts: ClassVar[tuple[str, ...]] = ()
    """Precisions that it computes a float32 graph in by itself, so that the graph stays as it is."""
    needs_shapes: ClassVar[bool] = False
    """True if it is built for ranges of shapes, given to it in :attr:`BuildRequest.ranges`."""
    file_suffix: ClassVar[str] = ""
    """Suffix of the engine file that the ``build`` command writes and ``benchmark`` reads; empty for no file."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Python packages that it cannot do without, which ``doctor`` imports to see whether they are whole."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that building it takes, for workers to import ahead: no other framework is imported then."""
    builder_tells_memory: ClassVar[bool] = False
    """True if :meth:`facts` has the memory that it will take, so that ``fit`` builds and does not run it."""
    replays_in: ClassVar[tuple[str, ...]] = ()
    """Forms of packages that replay CUDA graphs, where the variant does: ``bundle``, ``triton``."""
    package_caution: ClassVar[str] = ""
    """Warning for people who are handed a package of it."""
    kinds: ClassVar[tuple[str, ...]] = DEVICE_KINDS
    """Kinds of device that it can run on."""
    built_elsewhere: ClassVar[bool] = False
    """True if it can be built where it cannot run."""
    times_kernels: ClassVar[bool] = False
    """True if it chooses kernels on a GPU by their times there: when it is built, or in first calls if it is not."""
    memory_from_torch: ClassVar[bool] = False
    """True if its device memory comes from torch's caching allocator, which then counts it exactly."""
    shows_graph: ClassVar[bool] = False
    """True if it has :meth:`executed`."""
    loads_graph: ClassVar[bool] = False
    """True if it also loads the graph that it builds from, which then runs on machines that the engine does not."""
    has_infer_script: ClassVar[bool] = False
    """True if ``infer.py`` can run it from a bundle."""
    only_running: ClassVar[frozenset[str]] = frozenset()
    """Fields that change how it runs and not what is built."""

    @classmethod
    def as_given(cls) -> "Engine":
        """Make the engine that changes nothing about what it is given: the baseline of its kind of model."""
        return cls()

    @classmethod
    def simulating(cls) -> "Engine":
        """Make the engine that computes a graph as it is written, whether or not it has kernels for its types."""
        return cls.as_given()

    def describe_plain_use(self, graph: Path) -> str:
        """Describe what a graph needs in a program that loads it without enginesmith; empty if nothing."""
        return ""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> "Iterator[Configuration]":
        """Yield each way to build and run it that a recipe asks for, for a module or graph in this precision.

        Raises:
            UsageError: an option makes no sense for this engine.
        """
        yield Configuration(cls(), precision)

    @classmethod
    def runs_module(cls) -> bool:
        """Tell whether it runs the module itself, and so has no build step."""
        return cls.build is Engine.build

    @classmethod
    def candidate_precisions(cls, device: Device) -> tuple[str, ...]:
        """List the precisions that may make it faster on a device, for runs that list none by hand."""
        return ("fp32",)

    @classmethod
    def candidate_quantizers(cls, device: Device) -> tuple[Quantizer, ...]:
        """List the makers of int8 graphs that may make it faster on a device, for runs that list none by hand."""
        return cls.quantizers

    @classmethod
    def prefers_signed(cls, device: Device) -> bool:
        """Tell whether activations in int8 around 0 are faster on a device than those in uint8 with a zero point."""
        return False

    @classmethod
    def replays_graphs(cls) -> bool:
        """Tell whether it has the field ``cuda_graphs``; planning then makes variants with it, too."""
        return "cuda_graphs" in cls.model_fields

    def without_graphs(self) -> Self:
        """Copy the engine as it is built, and runs where CUDA graphs are not asked for."""
        return self.model_copy(update={"cuda_graphs": False}) if self.replays_graphs() else self

    @classmethod
    def usual_half(cls, device: Device) -> str:
        """Choose the half precision that people would cast a module to on a device; for engines that run modules."""
        return cls.precisions[-1]

    def as_shipped(self, device: Device) -> Self:
        """Copy the engine with the settings that its framework has on a device where nobody changes them."""
        return self

    def exact(self) -> Self:
        """Copy the engine with products that are not rounded further than its precision says."""
        return self

    @classmethod
    def check_options(cls, options: "EngineOptions") -> None:
        """Refuse options that do not go together.

        Raises:
            UsageError: what a recipe says of this engine makes no sense.
        """

    @classmethod
    def needs_trust(cls, options: Mapping[str, Any]) -> bool:
        """Tell whether an engine is loaded only where its maker is trusted, by its options of a package or a build."""
        return cls.native_code

    @classmethod
    def read_file(cls, path: Path) -> EngineFile | None:
        """Read what is recorded of an engine file with :attr:`file_suffix`; None if it is another engine's.

        Raises:
            ModelError: the record is missing or damaged, or the file is not the one that it describes.
        """
        return None

    @classmethod
    def shares_activations(cls, options: "EngineOptions") -> bool:
        """Tell whether all engines of a process work in one buffer, so that only the largest counts."""
        return False

    @classmethod
    def check_software(cls, stack: "Stack", exported: "Formats | None") -> "Iterable[Check]":
        """Check, for ``doctor``, its packages against driver, GPUs and the format of exports (None without onnx)."""
        return ()

    @classmethod
    def check_targets(cls) -> tuple[str, ...]:
        """List the targets that ``build --check`` tries where none is named."""
        return ()

    @classmethod
    def refit(cls, engine: Artifact, graph: Artifact, file: Path, device: Device) -> Effect:
        """Write a built engine with the weights of a graph to ``file``.

        Raises:
            MissingCapability: the engine cannot take new weights, or not here.
            EnginesmithError: this one or this graph cannot.
        """
        raise MissingCapability(f"{cls.name} takes no new weights once it is built", "build a new engine")

    @classmethod
    def restore_options(cls, record: Mapping[str, Any], *, trust: bool = False) -> dict[str, Any]:
        """Choose the fields that a file may give back to an engine: none that would run code, without ``trust``."""
        return {name: value for name, value in record.items() if name in cls.model_fields}

    @classmethod
    def running_options(cls, options: "EngineOptions") -> dict[str, Any]:
        """Read the fields of :attr:`only_running` that a packaged engine was measured with from a recipe."""
        return {}

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        """Describe the file that is packaged, for whoever loads it without enginesmith.

        Raises:
            ModelError: the file is not what it was.
        """
        return PackageFacts()

    @classmethod
    def from_package(cls, main: Path, options: Mapping[str, Any]) -> "Engine":
        """Make the engine for ``main`` and its :attr:`PackageFacts.options`, with none that it could allow itself."""
        return cls()

    @classmethod
    def infer_script(cls) -> Path | None:
        """Name the script that runs a bundle with the engine's own package alone; None if there is none."""
        return Path(__file__).with_name("infer.py") if cls.has_infer_script else None

    def variations(self) -> "Iterator[tuple[AddedOption, Engine]]":
        """Yield the options that may mend a wrong answer, each with the engine that has it."""
        yield from ()

    def reproduce(self, device: Device) -> str:
        """Return lines of Python that answer ``inputs`` by the graph at ``MODEL``, as ``found``, by output name.

        ``INPUTS`` and ``OUTPUTS`` are names in order. The engine's own package is enough; empty if it runs no file.
        """
        return ""

    @classmethod
    def triton(cls) -> TritonBackend | None:
        """Describe the backend of Triton Inference Server that runs it; None if that has none."""
        return None

    @classmethod
    def weight_bits(cls, device: Device) -> int:
        """Tell how many bits of an int8 weight its kernels on a device can use without saturating."""
        return 8

    @classmethod
    @abstractmethod
    def available(cls, device: Device) -> Availability:
        """Tell whether this machine can run it on that device; if not, why, and what to do about it."""

    @classmethod
    def installed(cls, device: Device) -> Availability:
        """Answer as :meth:`available` does, without importing heavy packages: that they load is not checked."""
        return cls.available(device)

    @classmethod
    def require(cls, device: Device) -> None:
        """Insist that this machine can run it on that device.

        Raises:
            MissingCapability: it is not; says why and what to do about it.
        """
        if device.kind not in DEVICE_KINDS:
            raise MissingCapability(f"there is no device {device.kind!r}", f"use one of {', '.join(DEVICE_KINDS)}")
        cls.available(device).require(f"{cls.name} cannot run on {device}")

    @classmethod
    def buildable(cls, device: Device) -> Availability:
        """Tell whether this machine can build it for a device."""
        return cls.available(device if cls.runs_module() else Device(kind=cls.kinds[0]))

    def runnable(self, device: Device) -> Availability:
        """Tell whether this machine can run what these options build."""
        return type(self).available(device)

    def require_runnable(self, device: Device) -> None:
        """Insist that this machine can run what these options build; raises as :meth:`require`."""
        self.require(device)
        self.runnable(device).require(f"{self.name} cannot run so on {device}")

    @property
    def built_ahead(self) -> bool:
        """True if these options build it for a device that need not be there, so that any machine will do."""
        return False

    @property
    def arithmetic(self) -> str:
        """Type of fp32 products: ``tf32`` where they may be rounded to its 10 bits, ``fp16`` or ``bf16`` where cast.

        It names the row of the fidelity thresholds that its outputs are held to.
        """
        return "fp32"

    @property
    def rounds_to_tf32(self) -> str:
        """Name the products of float32 that may be rounded to TF32 on a GPU that has it: ``convolutions``, ``all``."""
        return "all" if self.arithmetic == "tf32" else ""

    def facts(self, artifact: Artifact) -> EngineFacts:
        """Read what a built engine records of its memory and layers."""
        return EngineFacts()

    def tunable_options(self, graph: Path | None, device: Device) -> dict[str, tuple[str, ...]]:
        """List options that may make a graph faster on a device, and the values to try instead of the present one.

        Those that promise most come first. ``graph`` is an ONNX file, or None for any graph.
        """
        return {}

    def with_option(self, name: str, value: str) -> Self:
        """Copy the engine with another value of a tunable option."""
        raise TypeError(f"{self.name} has no option {name!r} to tune")

    def tuned(self, artifact: Artifact) -> Self:
        """Copy the engine with the fields that were measured to be the fastest for an artifact, if that was tuned."""
        file = artifact.folder / TUNING
        chosen = json.loads(file.read_bytes())["fields"] if file.is_file() else {}
        return type(self)(**{**dict(self), **chosen}) if chosen else self

    def executed(self, artifact: Artifact, device: Device, scratch: Path) -> Path:
        """Give the ONNX file of exactly those operators that a session runs; it may be written into ``scratch``."""
        raise TypeError(f"{self.name} does not show the graph that it runs")

    def assign_nodes(self, artifact: Artifact, device: Device) -> dict[str, dict[str, int]]:
        """Count the nodes that each part of the engine runs, by part and operator; empty if one part runs them all.

        The first part is the one that the engine is for.
        """
        return {}

    def environment_key(self, device: Device) -> dict[str, Any]:
        """Collect facts about this machine that decide what ``build`` writes; they are part of the key."""
        return {}

    def build(self, request: BuildRequest) -> Effect:
        """Write the engine's files; an engine that does not define this runs the module itself."""
        raise TypeError(f"{self.name} runs the module itself and is not built")

    def profile(self, request: ProfileRequest) -> Profiled:
        """Time each operator by the engine's own profiler; what runs is slower than it is without.

        Raises:
            MissingCapability: the engine has no profiler, or none that tells times here.
            ModelError: what was profiled failed, or the profile cannot be read.
        """
        raise MissingCapability(f"{self.name} has no profiler", "profile another engine")

    @abstractmethod
    def load(self, artifact: Artifact, device: Device) -> Session:
        """Open a session on an artifact that this engine consumes or has built.

        Raises:
            MissingCapability: the device is not there, or the engine would not run on it.
            ModelError: the artifact cannot be loaded.
        """

    @abstractmethod
    def prime(self, artifact: Artifact, device: Device) -> None:
        """Bring in, and keep, what a session of this artifact needs besides its own memory, then free the rest.

        That is libraries, the code of the model's source and thread pools; what stays is the baseline that memory is
        measured from.
        """


@dataclass(frozen=True)
class Candidate:
    """Name an engine and its artifact on a device, to be measured."""

    id: str
    engine: Engine
    artifact: Artifact
    device: Device
