"""Build and run TensorRT in two flavours: ``tensorrt``, built on its GPU, and ``tensorrt_rtx``, built anywhere.

Engines are strongly typed: precision is what the graph says. The engine file has a manifest beside it, which is checked
before the engine is loaded.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest
from enginesmith.pipeline.engines.base import BuildRequest, Configuration, EngineFacts, EngineFile, PackageFacts
from enginesmith.pipeline.engines.profiling import Profiled, ProfileRequest
from enginesmith.pipeline.engines.tensorrt import builder, layers, loader, manifest, parser, versions
from enginesmith.pipeline.engines.tensorrt.builder import BuilderSettings, Profile, build, compute_capabilities
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, RunOptions, SessionOptions, validate_options
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities, FlavourName
from enginesmith.pipeline.engines.triton import Fields, Message, TritonBackend, quoted
from enginesmith.pipeline.engines.workspace import MAX, PORTABLE, SWEPT, WorkspaceEngine
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.passes.sparsify import check, sparsify
from enginesmith.pipeline.store.address import default_address
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.tensors import Point, ShapeRange, Signature
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    import onnx

    from enginesmith.pipeline.engines.compatibility import Check
    from enginesmith.pipeline.engines.options import EngineOptions
    from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
    from enginesmith.pipeline.system.software import Formats, Stack


ENGINE_FILE, LOG_FILE = "model.engine", "model.engine.log"
_POINTS: tuple[Point, ...] = ("min", "opt", "max")
_PRIMING_BYTES = 1 << 20
_SHOWN = 200  # characters of a line of the builder's log


def make_profiles(signature: Signature, ranges: Mapping[str, ShapeRange], more: tuple[str, ...]) -> tuple[Profile, ...]:
    """Plan the optimization profiles asked for, in their order, and the whole range as the last one.

    One of ``more`` is written as ``batch=1:1:1,seq=1:64:128``; dimensions that are not named keep their whole range.

    Raises:
        UsageError: a dynamic dimension without a range; a profile of another dimension, or beyond its range.
    """
    missing = next((name for name in signature.symbols if name not in ranges), None)
    if missing:
        raise UsageError(f"the dynamic dimension {missing!r} has no range", f"give one: --shape {missing}=MIN:OPT:MAX")
    planned = []
    for text in more:
        narrowed = dict(ranges)
        for part in text.split(","):
            name, separator, value = part.partition("=")
            if not separator or name not in ranges:
                there = f"the dynamic dimensions are {', '.join(ranges) or 'none'}"
                remedy = "write it as batch=1:1:1,seq=1:64:128"
                raise UsageError(f"the profile {text!r} names {name!r}, and {there}", remedy)
            narrowed[name], whole = ShapeRange.parse(value), ranges[name]
            if narrowed[name].min < whole.min or narrowed[name].max > whole.max:
                raise UsageError(f"the profile {text!r} goes beyond the range {name}={whole}", "widen --shape")
        planned.append(narrowed)
    profiles = []
    for each in (*planned, ranges):
        low, usual, high = ({name: span.at(point) for name, span in each.items()} for point in _POINTS)
        shapes = {spec.name: (spec.resolve(low), spec.resolve(usual), spec.resolve(high)) for spec in signature.inputs}
        profiles.append(shapes)
    return tuple(profiles)


class TensorRT(WorkspaceEngine):
    """Build the enterprise flavour, whose kernels are chosen by timing them on the device, so it builds only there."""

    name: ClassVar[str] = "tensorrt"
    flavour: ClassVar[FlavourName] = "tensorrt"
    title: ClassVar[str] = "TensorRT"
    consumes: ClassVar[Kind] = "onnx"
    reads: ClassVar[tuple[str, ...]] = ("targets", "workspace", "tensorrt")
    needs_shapes: ClassVar[bool] = True
    file_suffix: ClassVar[str] = ".engine"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "tensorrt")
    modules: ClassVar[tuple[str, ...]] = ("onnx", "onnx.checker", "onnx.shape_inference", "tensorrt_rtx", __name__)
    builder_tells_memory: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    tools: ClassVar[tuple[str, ...]] = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
    times_kernels: ClassVar[bool] = True
    has_infer_script: ClassVar[bool] = True
    memory_from_torch: ClassVar[bool] = True
    only_running: ClassVar[frozenset[str]] = frozenset({"run", "cuda_graphs"})
    replays_in: ClassVar[tuple[str, ...]] = ("triton",)

    target: str | None = None
    options: BuildOptions = BuildOptions()
    run: RunOptions = RunOptions()
    cuda_graphs: bool = False
    """Capture each set of shapes once as a CUDA graph, and replay it."""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        limits: dict[str, int | None] = {}
        for text, asked_limit in zip(options.workspace, options.workspace_limits, strict=True):
            if asked_limit == "sweep":
                limits |= {MAX: None, **dict.fromkeys(SWEPT, None)}  # bytes that only a build can tell
            elif asked_limit is None or asked_limit not in limits.values():
                limits[text] = asked_limit
        for target in (options.targets if cls.known().targets else ()) or (None,):
            for word, limit in (limits or {"": None}).items():
                chosen = cls(workspace_bytes=limit, target=target, options=options.tensorrt, run=options.tensorrt_run)
                with contextlib.suppress(MissingCapability):  # this variant's own failure, once it is built
                    chosen.targets(nvidia.cuda_device((options.named_device or Device()).index))
                yield Configuration(chosen, precision, workspace=word, target=target)

    @classmethod
    def candidate_precisions(cls, device: Device) -> tuple[str, ...]:
        return ("fp32", "fp16", "int8+fp16")

    @classmethod
    def check_options(cls, options: "EngineOptions") -> None:
        lean = options.tensorrt.version_compatible and "version_compatible" not in cls.known().refused
        if lean and not options.tensorrt.host_code:
            message = "--version-compatible puts a runtime into the engine, which is code for the CPU"
            raise UsageError(message, "allow to load it: add --host-code")
        if options.tensorrt_run.weight_streaming_budget is not None and not options.tensorrt.weight_streaming:
            raise UsageError("--weight-streaming-budget needs an engine that streams weights", "add --weight-streaming")

    @classmethod
    def read_file(cls, path: Path) -> EngineFile | None:
        """Read the manifest beside it, and choose the options that loading takes."""
        record = manifest.read(path)
        if record.engine != cls.name:
            return None
        options = BuildOptions(tf32=record.options.tf32)  # and nothing that a file could allow itself
        return EngineFile(
            cls(options=options),
            record.version,
            record.compute_capabilities,
            record.signature,
            record.model_dump(mode="json"),
            (path, manifest.path_beside(path)),
            lambda: manifest.describe(path, record),
        )

    @classmethod
    def shares_activations(cls, options: "EngineOptions") -> bool:
        return options.tensorrt_run.share_activation_memory

    @classmethod
    def check_software(cls, stack: "Stack", exported: "Formats | None") -> "Iterable[Check]":
        return versions.check_software(stack, cls.tools[0])

    @classmethod
    def check_targets(cls) -> tuple[str, ...]:
        return cls.known().targets

    @classmethod
    def refit(cls, engine: Artifact, graph: Artifact, file: Path, device: Device) -> Effect:
        return loader.refit(engine, graph, file, device)

    @classmethod
    def restore_options(cls, record: Mapping[str, Any], *, trust: bool = False) -> dict[str, Any]:
        """Keep, of the build options, only whether products are rounded; with ``trust``, also whether code may run."""
        given = record.get("options")
        old_options = given if isinstance(given, dict) else {}
        options = BuildOptions(tf32=bool(old_options.get("tf32")), host_code=trust and cls.needs_trust(old_options))
        return {**super().restore_options(record), "options": options}

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        record = manifest.read(main)
        options = record.options.model_dump(include={"tf32", "version_compatible", "host_code"})
        options["plugins"] = [Path(path).name for path in record.options.plugins]
        options |= {"cuda_graphs": self.cuda_graphs, "profiles": len(record.profiles)}
        return PackageFacts(record.version, record.compute_capabilities, options)

    @classmethod
    def from_package(cls, main: Path, options: Mapping[str, Any]) -> "TensorRT":
        tf32, host_code = bool(options.get("tf32", True)), cls.needs_trust(options)
        return cls(options=BuildOptions(tf32=tf32, host_code=host_code))

    @classmethod
    def needs_trust(cls, options: Mapping[str, Any]) -> bool:
        return bool(options.get("host_code"))

    @classmethod
    def triton(cls) -> TritonBackend | None:
        """Describe the TensorRT backend, which loads engines of this flavour alone."""

        def remark(engine: Mapping[str, Any]) -> tuple[str, ...]:
            targets = ", ".join(engine["compute_capabilities"])
            needed = f"needs a Triton with TensorRT {engine['version']}"
            if not engine["options"].get("version_compatible"):
                return (f"{needed}, on {targets}",)
            allowed = "started with --backend-config=tensorrt,version-compatible=true"
            return (f"{needed} or later, on {targets}, {allowed}: code in the engine is run",)

        def configure(options: Mapping[str, Any], device: str) -> Fields:
            cuda = Message([("graphs", "true")])  # model_config.proto: the TensorRT backend alone knows it
            return [("optimization", Message([("cuda", cuda)]))] if options.get("cuda_graphs") else []

        def group(options: Mapping[str, Any]) -> Fields:
            profiles = [quoted(str(index)) for index in range(options.get("profiles", 1))]
            return [("profile", profiles)] if profiles[1:] else []  # without names it has a context for the first alone

        return TritonBackend("tensorrt", "model.plan", "tensorrt_plan", configure, group, remark)

    @classmethod
    def gates_workspace(cls) -> bool:
        return cls.known().workspace_is_a_gate

    @classmethod
    def smallest_workspace(cls, build: Callable[[int], object], unlimited: EngineFacts) -> int:
        return builder.find_smallest_workspace(build, unlimited, cls.known())

    @classmethod
    def workspace_points(cls, unlimited: EngineFacts, smallest: int, count: int) -> tuple[int, ...]:
        return builder.space_workspaces(unlimited, smallest, count)

    @classmethod
    def available(cls, device: Device) -> Availability:
        answer = cls.installed(device)
        return versions.importable(cls.flavour) if answer.ok else answer

    @classmethod
    def installed(cls, device: Device) -> Availability:
        if device.kind not in cls.kinds:
            return unavailable("it runs on CUDA only", "use --device cuda")
        availability = versions.importable(cls.flavour, load=False)
        if not availability.ok or not (availability := nvidia.available(device.index)).ok:
            return availability
        here, targets = nvidia.cuda_device(device.index), cls.known().targets
        if here and targets and here.target not in targets:
            reason = f"{cls.title} has no target {here.target} ({here.name})"
            return unavailable(reason, "use --engine tensorrt: pip install -e '.[tensorrt]' in the checkout")
        return availability

    @classmethod
    def buildable(cls, device: Device) -> Availability:
        availability = versions.importable(cls.flavour)
        return nvidia.available(0) if availability.ok and not cls.known().builds_without_gpu else availability

    @classmethod
    def known(cls) -> Capabilities:
        """Look up what the installed version can do."""
        return versions.capabilities(cls.flavour)

    @property
    def arithmetic(self) -> str:
        return "tf32" if self.options.tf32 else "fp32"

    @property
    def built_ahead(self) -> bool:
        return bool(self.target) and self.known().builds_without_gpu

    def runnable(self, device: Device) -> Availability:
        availability = type(self).available(device)
        targets = compute_capabilities(self.target, self.known())
        here = nvidia.cuda_device(device.index)
        if not availability.ok or not targets or here is None or here.target in targets:
            return availability
        reason = f"it is built for {', '.join(targets)}, and {device} is {here.target} ({here.name})"
        return unavailable(reason, f"build it for --target {here.target}")

    def environment_key(self, device: Device) -> dict[str, Any]:
        """Collect the device and driver that kernels are timed on, where no target was named; plugins by content."""
        plugins = {name: file_digest(Path(name)) for name in self.options.plugins if Path(name).is_file()}
        facts: dict[str, Any] = {"plugins": plugins} if plugins else {}
        if self.built_ahead:
            return facts
        here = nvidia.cuda_device(device.index)
        facts |= {"device": here.model_dump() if here else None, "driver": nvidia.driver().version}
        if self.options.locked and (file := self._timing_cache(self.known(), here)) and file.is_file():
            facts["timing"] = file_digest(file)
        return facts

    def build(self, request: BuildRequest) -> Effect:
        """Write the engine and its manifest, audited.

        Raises:
            MissingCapability: the package, the device or an option is not to be had here.
            UnsupportedGraph, LimitTooSmall, BuilderFailed: what the builder made of it.
        """
        graph, signature, file = request.artifact, request.artifact.signature, request.out / ENGINE_FILE
        assert signature is not None
        trt, here = versions.module(self.flavour), nvidia.cuda_device(request.device.index)
        model = model_file.skeleton(graph.path)
        settings, notes = self._settings(request, model, signature, here)
        timed = settings.device is not None
        built = build(settings, graph.path, file, request.progress)
        log = built.log.text
        # the builder's words on layers that sparse kernels could compute, and on those that they do
        lines = (line.partition("(Sparsity)")[2].strip() for line in log.splitlines() if "(Sparsity)" in line)
        notes += [f"sparsity: {line[:_SHOWN]}" for line in lines]
        audit = layers.audit(built.log.layers, model, signature, "build log", built.tensors)
        record = EngineManifest(
            engine=self.flavour,
            version=trt.__version__,
            target=self.target,
            compute_capabilities=settings.targets or ((here.target,) if here else ()),
            device=here.name if here and timed else None,
            driver=nvidia.driver().version if timed else None,
            sha256=built.sha256,
            bytes=file.stat().st_size,
            model_sha256=graph.sha256,
            timing_cache_sha256=built.timing_cache_sha256,
            workspace_limit_bytes=built.workspace_limit_bytes,
            workspace_asked_bytes=self.workspace_bytes,
            options=settings.options,
            profiles=tuple(dict(profile) for profile in settings.profiles),
            signature=signature,
            figures=built.figures,
            audit=audit,
            notes=tuple(notes),
        )
        manifest.path_beside(file).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (request.out / LOG_FILE).write_text(log, encoding="utf-8")
        rejected = f"the engine is not what was asked for: {audit.problems[0]}" if audit.problems else ""
        notes += audit.notes
        return Effect(
            file=ENGINE_FILE, summary=_summary(record), notes=tuple(notes), signature=signature, rejected=rejected
        )

    def _settings(
        self, request: BuildRequest, model: "onnx.ModelProto", signature: Signature, here: nvidia.CudaDevice | None
    ) -> tuple[BuilderSettings, list[str]]:
        """Choose the settings of a build where it can be done, and list notes on them."""
        known, index = self.known(), request.device.index
        timed = not known.builds_without_gpu  # kernels, on the device that is here
        if timed:
            nvidia.available(index).require(f"{self.name} cannot be built here")
        targets = self.targets(here)
        options, sparsity = _for_graph(self.options, model, request.artifact.path)
        notes = [*sparsity, *validate_options(options, self.flavour, known, device=here is not None)]
        if known.workspace_is_a_gate and self.workspace_bytes is not None:
            notes.append(f"in {self.name} the workspace limit decides if the engine is built, and changes nothing else")
        parser.validate_graph(model, targets or ((here.target,) if here else ()), known)
        settings = BuilderSettings(
            flavour=self.flavour,
            known=known,
            options=options,
            workspace_bytes=self.workspace_bytes,
            targets=targets,
            profiles=make_profiles(signature, request.ranges, options.profiles),
            timing_cache=self._timing_cache(known, here),
            device=index if timed else None,
        )
        return settings, notes

    def targets(self, here: nvidia.CudaDevice | None) -> tuple[str, ...]:
        """List what the builder is told to compile for, where ``here`` is the device at hand.

        Raises:
            UsageError: a target that this flavour does not have, or none where there is no device to take it from.
            MissingCapability: the device is no target of this flavour.
        """
        known = self.known()
        if not known.targets:
            if self.target and (here is None or self.target != here.target):
                message = f"{self.name} builds for the device that is here, and the target is {self.target}"
                raise UsageError(message, "omit --target, or use tensorrt_rtx, which builds ahead of time")
            return ()
        choices = ", ".join((*known.targets, PORTABLE))
        if self.target is None:
            if here is None:
                message = f"{self.name} needs a target where there is no GPU to take it from"
                raise UsageError(message, f"give --target: {choices}")
            if here.target not in known.targets:
                version = versions.installed_version(self.flavour)
                message = f"{self.name} {version} has no target {here.target} ({here.name})"
                remedy = f"use --engine tensorrt on this device (the extra `tensorrt` installs it); targets: {choices}"
                raise MissingCapability(message, remedy)
            return (here.target,)
        if self.target not in (*known.targets, PORTABLE):
            raise UsageError(f"{self.name} has no target {self.target!r}", f"use one of {choices}")
        return compute_capabilities(self.target, known)

    def _timing_cache(self, known: Capabilities, here: nvidia.CudaDevice | None) -> Path | None:
        """Name the file of kernel timings: the one that was given, else one for each device and version."""
        if not known.timing_cache or here is None:
            return None
        if self.options.timing_cache:
            return Path(self.options.timing_cache)
        name = f"{here.file_stem}-{versions.installed_version(self.flavour)}.cache"
        return default_address().folder / "timing" / name

    def facts(self, artifact: Artifact) -> EngineFacts:
        record = manifest.read(artifact.path)
        counts, limit = record.audit.layers if record.audit else None, record.workspace_limit_bytes
        return EngineFacts(workspace_limit_bytes=limit, layers=counts, **record.figures.model_dump())

    def profile(self, request: ProfileRequest) -> Profiled:
        from enginesmith.pipeline.engines.tensorrt.session import profile

        notes = ("profiled without CUDA graphs",) if self.cuda_graphs else ()
        with self.without_graphs().load(request.artifact, request.device) as session:
            return profile(versions.module(self.flavour), session, request, notes)

    def load(self, artifact: Artifact, device: Device) -> "TensorRTSession":
        from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession

        record = manifest.read(artifact.path)
        self.require(device)
        manifest.validate_machine(record, device.index)
        trt, run = versions.module(self.flavour), SessionOptions(**dict(self.run), cuda_graphs=self.cuda_graphs)
        opened = loader.open_engine(trt, artifact.path, record, self.known(), device, self.options, run)
        return TensorRTSession(trt, opened, record.signature, device, run)

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Start CUDA and the libraries; an engine's weights and contexts come on top."""
        import torch

        self.require(device)
        trt = versions.module(self.flavour)
        torch.cuda.set_device(device.index)
        torch.empty(_PRIMING_BYTES, dtype=torch.uint8, device=str(device))
        trt.Runtime(trt.Logger(trt.Logger.ERROR))


class TensorRTRTX(TensorRT):
    """Build the RTX flavour ahead of time for named targets, on any machine; the first run compiles the kernels."""

    name: ClassVar[str] = "tensorrt_rtx"
    title: ClassVar[str] = "TensorRT-RTX"
    flavour: ClassVar[FlavourName] = "tensorrt_rtx"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "tensorrt_rtx")
    tools: ClassVar[tuple[str, ...]] = ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12")
    built_elsewhere: ClassVar[bool] = True
    times_kernels: ClassVar[bool] = False

    @classmethod
    def triton(cls) -> None:
        """Return None: Triton has no backend for this flavour's runtime."""


def _for_graph(options: BuildOptions, model: "onnx.ModelProto", path: Path) -> tuple[BuildOptions, tuple[str, ...]]:
    """Choose a graph's build options: sparse kernels are allowed where it is marked as 2:4 and its weights are.

    The builder decides for each layer whether a sparse kernel is faster, and says which it took in its log.
    """
    if sparsify.of(model) != sparsify.TWO_OF_FOUR:
        return options, ()
    weights = check.sparse_weights(path)
    sparse = sum(weight.two_of_four for weight in weights)
    if not sparse:
        return options, ("the graph is marked as 2:4, and none of its weights is: SPARSE_WEIGHTS is left as it was",)
    note = f"SPARSE_WEIGHTS is set: {sparse} of {len(weights)} weights of the graph are 2:4"
    return options.model_copy(update={"sparse_weights": True}), (note,)


def _summary(record: EngineManifest) -> str:
    figures = record.figures
    workspace_bytes = record.workspace_asked_bytes
    limit = format_bytes(record.workspace_limit_bytes) + (
        "" if workspace_bytes is not None else ", the builder's default"
    )
    built_for = ", ".join(record.compute_capabilities)
    return (
        f"{format_bytes(record.bytes)} for {built_for}: weights {format_bytes(figures.weights_bytes)}, activations "
        f"{format_bytes(figures.activation_bytes)} at the largest shape; workspace limit {limit}"
    )
