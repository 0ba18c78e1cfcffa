// libnvinfer, libnvinfer_plugin and libnvonnxparser for tests: TensorRT's Python bindings and our sessions run on them.
//
// What it does: builds "plans" that are a few lines of text, opens them, and keeps the rules that TensorRT's documents
// state: profiles before shapes, enough activation memory, an address for each tensor. Memory is taken through the
// allocators that it is given; loggers, monitors and output allocators are called as TensorRT calls them.
// What it does not do: compute. A call fills outputs with zeros, so a network whose weights are zero answers right.
//
// The vendor's interfaces are inline functions that call an implementation by its table of virtual functions. Such a
// table is made here with our functions in the places that the headers give; every other place ends the process.
// A function with another signature than the header's does not compile. x86-64 and the Itanium C++ ABI only.
//
// Of a graph only the inputs, the outputs and the names of products are read. A free size of an input is the batch; a
// free size that only an output has is known after a run. STUB_FAULT names a fault: parse, build, deserialize, weights,
// context, shapes, memory, enqueue, capture; or "wide", for layers that are in fp32 whatever the graph says.

#include <NvInfer.h>
#include <NvInferPlugin.h>
#include <NvOnnxParser.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

extern "C" int cudaMemsetAsync(void*, int, size_t, cudaStream_t) __attribute__((weak));
extern "C" int cudaStreamIsCapturing(cudaStream_t, int*) __attribute__((weak));

using namespace nvinfer1;

namespace
{

bool fault(char const* name)
{
    char const* wanted = std::getenv("STUB_FAULT");
    return wanted && std::strcmp(wanted, name) == 0;
}

void say(ILogger* logger, ILogger::Severity severity, std::string const& text)
{
    if (logger)
    {
        logger->log(severity, text.c_str());
    }
}

template <class V, size_t N>
void missing()
{
    std::fprintf(stderr, "libnvinfer for tests has no function %zu of %s\n", N, typeid(V*).name());
    std::abort();
}

// The table of virtual functions of an implementation class V.
template <class V>
class Table
{
public:
    static constexpr size_t kSIZE = 160;

    Table()
    {
        fill(std::make_index_sequence<kSIZE>{});
        slots_[0] = nullptr; // the object is at the start of itself
        slots_[1] = const_cast<std::type_info*>(&typeid(INoCopyLike));
    }

    template <class R, class... A, class F>
    Table& set(R (V::*member)(A...) noexcept, F function)
    {
        R (*plain)(V*, A...) = function;
        return put(member, reinterpret_cast<void*>(plain));
    }

    template <class R, class... A, class F>
    Table& set(R (V::*member)(A...) const noexcept, F function)
    {
        R (*plain)(V const*, A...) = function;
        return put(member, reinterpret_cast<void*>(plain));
    }

    // A destructor has no address: it is in the two places after a function of the same class.
    template <class M>
    Table& destructorAfter(M member)
    {
        slots_[2 + slot(member) + 1] = slots_[2 + slot(member) + 2] = reinterpret_cast<void*>(+[](V*) {});
        return *this;
    }

    void* const* get() const
    {
        return slots_ + 2;
    }

private:
    struct INoCopyLike
    {
        virtual ~INoCopyLike() = default;
    };

    template <size_t... N>
    void fill(std::index_sequence<N...>)
    {
        ((slots_[2 + N] = reinterpret_cast<void*>(&missing<V, N>)), ...);
    }

    template <class M>
    static size_t slot(M member)
    {
        size_t value;
        std::memcpy(&value, &member, sizeof(value));
        return (value - 1) / sizeof(void*);
    }

    template <class M>
    Table& put(M member, void* function)
    {
        slots_[2 + slot(member)] = function;
        return *this;
    }

    void* slots_[2 + kSIZE];
};

// What the bindings hold: an interface of the vendor's with an implementation of ours.
template <class I, class V, class Impl>
struct Shell final : I
{
    explicit Shell(std::shared_ptr<Impl> made)
        : impl(std::move(made))
    {
        this->mImpl = reinterpret_cast<V*>(impl.get());
    }

    std::shared_ptr<Impl> impl;
};

template <class Impl>
Impl& self(void const* object)
{
    return *static_cast<Impl*>(const_cast<void*>(object));
}

struct Tensor
{
    bool input;
    std::string name;
    DataType type;
    std::vector<int64_t> dims; // -1 is the batch, -2 is known after a run
    std::vector<std::array<int64_t, 3>> ranges{}; // of the batch, by profile: smallest, usual and largest
};

size_t bytesOf(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT:
    case DataType::kINT32: return 4;
    case DataType::kINT64: return 8;
    case DataType::kHALF:
    case DataType::kBF16: return 2;
    default: return 1;
    }
}

Dims toDims(std::vector<int64_t> const& sizes, int64_t batch = -1)
{
    Dims dims{};
    dims.nbDims = static_cast<int32_t>(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i)
    {
        dims.d[i] = sizes[i] == -1 ? batch : sizes[i] == -2 ? -1 : sizes[i];
    }
    return dims;
}

std::vector<Tensor> readTensors(std::istream& lines)
{
    std::vector<Tensor> tensors;
    for (std::string line; std::getline(lines, line);)
    {
        std::istringstream words(line);
        std::string side;
        Tensor tensor{};
        int32_t type;
        if (!(words >> side >> tensor.name >> type) || (side != "input" && side != "output"))
        {
            continue;
        }
        tensor.input = side == "input";
        tensor.type = static_cast<DataType>(type);
        std::string word;
        while (words >> word && word != "range")
        {
            tensor.dims.push_back(std::stoll(word));
        }
        for (std::array<int64_t, 3> range; words >> range[0] >> range[1] >> range[2];)
        {
            tensor.ranges.push_back(range);
        }
        tensors.push_back(tensor);
    }
    return tensors;
}

constexpr int64_t kBYTES_PER_SAMPLE = 4096; // activations

// --- Host memory -----------------------------------------------------------------------------------------------------

struct HostMemory
{
    void* const* table;
    std::string text;
};

IHostMemory* hostMemory(std::string text)
{
    static Table<apiv::VHostMemory> const table
        = Table<apiv::VHostMemory>{}
              .set(&apiv::VHostMemory::data,
                  [](auto const* it) -> void* { return self<HostMemory>(it).text.data(); })
              .set(&apiv::VHostMemory::size, [](auto const* it) -> size_t { return self<HostMemory>(it).text.size(); })
              .set(&apiv::VHostMemory::type, [](auto const*) { return DataType::kINT8; });
    return new Shell<IHostMemory, apiv::VHostMemory, HostMemory>(
        std::make_shared<HostMemory>(HostMemory{table.get(), std::move(text)}));
}

// --- Runtime configuration, execution context ------------------------------------------------------------------------

struct RuntimeConfig
{
    void* const* table;
    ExecutionContextAllocationStrategy strategy = ExecutionContextAllocationStrategy::kSTATIC;
};

struct Engine;

struct Context
{
    void* const* table;
    std::shared_ptr<Engine> engine;
    ExecutionContextAllocationStrategy strategy;
    int32_t profile = 0; // of a new context
    int64_t batch = -1;
    void* memory = nullptr;
    int64_t memoryBytes = 0;
    int64_t calls = 0;
    std::map<std::string, void*> addresses{};
    std::map<std::string, IOutputAllocator*> allocators{};
    IGpuAllocator* temporary = nullptr;
    IProfiler* profiler = nullptr;

    bool enqueue(cudaStream_t stream);
};

struct Engine
{
    void* const* table;
    ILogger* logger;
    IGpuAllocator* allocator;
    std::vector<Tensor> tensors;
    size_t weightBytes;
    int64_t limit = 1; // the largest batch of any profile
    size_t profiles = 1;
    std::string layers{};
    void* weights = nullptr;
    std::weak_ptr<Engine> me{};
    ICudaEngine* shell = nullptr;

    ~Engine()
    {
        if (weights && !allocator->deallocateAsync(weights, nullptr))
        {
            say(logger, ILogger::Severity::kERROR, "the allocator does not take the weights back");
        }
    }

    Tensor const* find(char const* name) const
    {
        for (auto const& tensor : tensors)
        {
            if (tensor.name == name)
            {
                return &tensor;
            }
        }
        say(logger, ILogger::Severity::kERROR, std::string("there is no tensor ") + name);
        return nullptr;
    }
};

bool Context::enqueue(cudaStream_t stream)
{
    auto refuse = [this](std::string const& text) {
        say(engine->logger, ILogger::Severity::kERROR, "IExecutionContext::enqueueV3: Error Code 3: " + text);
        return false;
    };
    int capturing = 0;
    if (cudaStreamIsCapturing && cudaStreamIsCapturing(stream, &capturing) == 0 && capturing)
    {
        if (fault("capture") || calls == 0)
        {
            return refuse("a first call cannot be captured");
        }
    }
    int64_t const needed = fault("memory") ? kBYTES_PER_SAMPLE * engine->limit : kBYTES_PER_SAMPLE * batch;
    if (fault("enqueue"))
    {
        return refuse("this call was to fail");
    }
    bool const own = strategy == ExecutionContextAllocationStrategy::kSTATIC; // it has memory for all profiles
    if (batch < 1 || (!own && (memoryBytes < needed || !memory)))
    {
        return refuse("there are " + std::to_string(memoryBytes) + " bytes of device memory for this context, and it needs "
            + std::to_string(needed));
    }
    if (temporary && calls == 0) // what a first call needs besides
    {
        void* scratch = temporary->allocateAsync(512, 256, 0, stream);
        if (!scratch || !temporary->deallocateAsync(scratch, stream))
        {
            return refuse("Requested amount of GPU memory (512 bytes) could not be allocated. out of memory");
        }
    }
    for (auto const& tensor : engine->tensors)
    {
        void* address = addresses.count(tensor.name) ? addresses[tensor.name] : nullptr;
        Dims shape = toDims(tensor.dims, batch);
        size_t count = bytesOf(tensor.type);
        for (int32_t i = 0; i < shape.nbDims; ++i)
        {
            shape.d[i] = shape.d[i] == -1 ? batch : shape.d[i]; // as many as there are rows
            count *= static_cast<size_t>(shape.d[i]);
        }
        if (auto* allocator = allocators.count(tensor.name) ? allocators[tensor.name] : nullptr)
        {
            address = allocator->reallocateOutputAsync(tensor.name.c_str(), address, count, 256, stream);
            allocator->notifyShape(tensor.name.c_str(), shape);
        }
        if (!address)
        {
            return refuse("the tensor " + tensor.name + " has no address");
        }
        if (!tensor.input && (!cudaMemsetAsync || cudaMemsetAsync(address, 0, count, stream) != 0))
        {
            return refuse("nothing can be written at " + tensor.name);
        }
    }
    if (profiler)
    {
        profiler->reportLayerTime("/first/MatMul_myl0_0", 0.25F);
    }
    ++calls;
    return true;
}

IExecutionContext* makeContext(Engine& engine, ExecutionContextAllocationStrategy strategy)
{
    using V = apiv::VExecutionContext;
    static Table<V> const table
        = Table<V>{}
              .set(&V::setOptimizationProfileAsync,
                  [](auto* it, int32_t index, cudaStream_t) {
                      self<Context>(it).profile = index;
                      self<Context>(it).batch = -1;
                      return index >= 0 && static_cast<size_t>(index) < self<Context>(it).engine->profiles;
                  })
              .set(&V::getEngine,
                  [](auto const* it) -> ICudaEngine const& { return *self<Context>(it).engine->shell; })
              .set(&V::getOptimizationProfile, [](auto const* it) { return self<Context>(it).profile; })
              .set(&V::setInputShape,
                  [](auto* it, char const* name, Dims const& dims) {
                      auto& context = self<Context>(it);
                      auto const* tensor = context.engine->find(name);
                      if (!tensor || context.profile < 0 || dims.nbDims != static_cast<int32_t>(tensor->dims.size()))
                      {
                          return false;
                      }
                      context.batch = tensor->dims.empty() || tensor->dims[0] != -1 ? 1 : dims.d[0];
                      if (tensor->ranges.empty())
                      {
                          return true;
                      }
                      auto const& range = tensor->ranges[static_cast<size_t>(context.profile)];
                      return range[0] <= context.batch && context.batch <= range[2];
                  })
              .set(&V::inferShapes,
                  [](auto*, int32_t count, char const** names) {
                      if (!fault("shapes"))
                      {
                          return 0;
                      }
                      names[0] = "x";
                      return count ? 1 : 0;
                  })
              .set(&V::getTensorShape,
                  [](auto const* it, char const* name) {
                      auto const& context = self<Context>(it);
                      auto const* tensor = context.engine->find(name);
                      return tensor ? toDims(tensor->dims, context.batch) : Dims{-1, {}};
                  })
              .set(&V::updateDeviceMemorySizeForShapes,
                  [](auto* it) -> size_t { return static_cast<size_t>(kBYTES_PER_SAMPLE * self<Context>(it).batch); })
              .set(&V::setDeviceMemoryV2,
                  [](auto* it, void* memory, int64_t size) {
                      auto& context = self<Context>(it);
                      if (context.strategy != ExecutionContextAllocationStrategy::kUSER_MANAGED)
                      {
                          say(context.engine->logger, ILogger::Severity::kERROR, "this context has memory of its own");
                      }
                      context.memory = memory;
                      context.memoryBytes = size;
                  })
              .set(&V::setTensorAddress,
                  [](auto* it, char const* name, void* address) {
                      self<Context>(it).addresses[name] = address;
                      return self<Context>(it).engine->find(name) != nullptr && address != nullptr;
                  })
              .set(&V::setOutputAllocator,
                  [](auto* it, char const* name, IOutputAllocator* allocator) {
                      self<Context>(it).allocators[name] = allocator;
                      return true;
                  })
              .set(&V::setTemporaryStorageAllocator,
                  [](auto* it, IGpuAllocator* allocator) {
                      self<Context>(it).temporary = allocator;
                      return true;
                  })
              .set(&V::getTemporaryStorageAllocator, [](auto const* it) { return self<Context>(it).temporary; })
              .set(&V::setProfiler, [](auto* it, IProfiler* profiler) { self<Context>(it).profiler = profiler; })
              .set(&V::getProfiler, [](auto const* it) { return self<Context>(it).profiler; })
              .set(&V::enqueueV3, [](auto* it, cudaStream_t stream) { return self<Context>(it).enqueue(stream); });
    if (fault("context"))
    {
        say(engine.logger, ILogger::Severity::kERROR, "Error Code 2: OutOfMemory (Requested size was 9 bytes.)");
        return nullptr;
    }
    auto made = std::make_shared<Context>(Context{table.get(), engine.me.lock(), strategy});
    return new Shell<IExecutionContext, V, Context>(made);
}

IRuntimeConfig* makeRuntimeConfig()
{
    using V = apiv::VRuntimeConfig;
    static Table<V> const table
        = Table<V>{}
              .set(&V::setExecutionContextAllocationStrategy,
                  [](auto* it, ExecutionContextAllocationStrategy strategy) { self<RuntimeConfig>(it).strategy = strategy; })
              .set(&V::getExecutionContextAllocationStrategy, [](auto const* it) { return self<RuntimeConfig>(it).strategy; });
    return new Shell<IRuntimeConfig, V, RuntimeConfig>(std::make_shared<RuntimeConfig>(RuntimeConfig{table.get()}));
}

// --- Inspector, engine, runtime --------------------------------------------------------------------------------------

struct Inspector
{
    void* const* table;
    std::string layers;
};

IEngineInspector* makeInspector(std::string layers)
{
    using V = apiv::VEngineInspector;
    static Table<V> const table
        = Table<V>{}
              .set(&V::setExecutionContext, [](auto*, IExecutionContext const*) { return true; })
              .set(&V::getEngineInformation,
                  [](auto const* it, LayerInformationFormat) { return self<Inspector>(it).layers.c_str(); });
    return new Shell<IEngineInspector, V, Inspector>(std::make_shared<Inspector>(Inspector{table.get(), std::move(layers)}));
}

ICudaEngine* makeEngine(ILogger* logger, IGpuAllocator* allocator, std::string const& plan)
{
    using V = apiv::VCudaEngine;
    static Table<V> const table
        = Table<V>{}
              .set(&V::getNbIOTensors, [](auto const* it) { return static_cast<int32_t>(self<Engine>(it).tensors.size()); })
              .set(&V::getIOTensorName,
                  [](auto const* it, int32_t index) {
                      return self<Engine>(it).tensors[static_cast<size_t>(index)].name.c_str();
                  })
              .set(&V::getTensorDataType,
                  [](auto const* it, char const* name) {
                      auto const* tensor = self<Engine>(it).find(name);
                      return tensor ? tensor->type : DataType::kFLOAT;
                  })
              .set(&V::getTensorLocation, [](auto const*, char const*) { return TensorLocation::kDEVICE; })
              .set(&V::getTensorShape,
                  [](auto const* it, char const* name) {
                      auto const* tensor = self<Engine>(it).find(name);
                      return tensor ? toDims(tensor->dims) : Dims{-1, {}};
                  })
              .set(&V::getTensorIOMode,
                  [](auto const* it, char const* name) {
                      auto const* tensor = self<Engine>(it).find(name);
                      return !tensor ? TensorIOMode::kNONE : tensor->input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
                  })
              .set(&V::getNbOptimizationProfiles,
                  [](auto const* it) { return static_cast<int32_t>(self<Engine>(it).profiles); })
              .set(&V::getProfileShape,
                  [](auto const* it, char const* name, int32_t profile, OptProfileSelector select) {
                      auto const* tensor = self<Engine>(it).find(name);
                      auto const which = static_cast<size_t>(profile);
                      bool const free = tensor && which < tensor->ranges.size();
                      int64_t const batch = free ? tensor->ranges[which][static_cast<size_t>(select)] : 1;
                      return tensor ? toDims(tensor->dims, batch) : Dims{-1, {}};
                  })
              .set(&V::getDeviceMemorySizeForProfileV2,
                  [](auto const* it, int32_t) { return kBYTES_PER_SAMPLE * self<Engine>(it).limit; })
              .set(&V::getStreamableWeightsSize, [](auto const*) { return int64_t{0}; })
              .set(&V::createEngineInspector, [](auto const* it) { return makeInspector(self<Engine>(it).layers); })
              .set(&V::createRuntimeConfig, [](auto*) { return makeRuntimeConfig(); })
              .set(&V::createExecutionContext,
                  [](auto* it, ExecutionContextAllocationStrategy strategy) {
                      return makeContext(self<Engine>(it), strategy);
                  })
              .set(&V::createExecutionContextWithRuntimeConfig, [](auto* it, IRuntimeConfig* config) {
                  return makeContext(self<Engine>(it), config->getExecutionContextAllocationStrategy());
              });
    std::istringstream lines(plan);
    std::string first;
    size_t weightBytes = 0;
    if (fault("deserialize") || !(lines >> first >> weightBytes) || first != "stub")
    {
        say(logger, ILogger::Severity::kERROR, "IRuntime::deserializeCudaEngine: Error Code 1: a plan of another kind");
        return nullptr;
    }
    auto engine = std::make_shared<Engine>(Engine{table.get(), logger, allocator, readTensors(lines), weightBytes});
    engine->me = engine;
    engine->layers = plan.substr(plan.find("Layers:\n"));
    for (auto const& tensor : engine->tensors)
    {
        engine->profiles = std::max(engine->profiles, tensor.ranges.size());
        for (auto const& range : tensor.ranges)
        {
            engine->limit = std::max(engine->limit, range[2]);
        }
    }
    if (allocator)
    {
        engine->weights = allocator->allocateAsync(fault("weights") ? UINT64_C(1) << 60 : weightBytes, 256, 0, nullptr);
        if (!engine->weights)
        {
            say(logger, ILogger::Severity::kERROR, "Error Code 2: OutOfMemory (Requested size was too large.)");
            return nullptr;
        }
    }
    return engine->shell = new Shell<ICudaEngine, V, Engine>(engine);
}

struct Runtime
{
    void* const* table;
    ILogger* logger;
    IGpuAllocator* allocator = nullptr;
    bool hostCode = false;
};

// --- Network and parser ----------------------------------------------------------------------------------------------

struct TensorImpl
{
    void* const* table;
    Tensor tensor;
};

using TensorShell = Shell<ITensor, apiv::VTensor, TensorImpl>;

struct Network
{
    void* const* table;
    std::vector<std::unique_ptr<TensorShell>> inputs{};
    std::vector<std::unique_ptr<TensorShell>> outputs{};
    std::vector<std::string> products{};
    size_t weightBytes = 256;
};

std::unique_ptr<TensorShell> makeTensor(Tensor tensor)
{
    using V = apiv::VTensor;
    static Table<V> const table
        = Table<V>{}
              .set(&V::getName, [](auto const* it) { return self<TensorImpl>(it).tensor.name.c_str(); })
              .set(&V::getDimensions, [](auto const* it) { return toDims(self<TensorImpl>(it).tensor.dims); })
              .set(&V::getType, [](auto const* it) { return self<TensorImpl>(it).tensor.type; })
              .set(&V::isShapeTensor, [](auto const*) { return false; });
    return std::make_unique<TensorShell>(std::make_shared<TensorImpl>(TensorImpl{table.get(), std::move(tensor)}));
}

INetworkDefinition* makeNetwork()
{
    using V = apiv::VNetworkDefinition;
    static Table<V> const table
        = Table<V>{}
              .set(&V::getNbInputs, [](auto const* it) { return static_cast<int32_t>(self<Network>(it).inputs.size()); })
              .set(&V::getNbOutputs, [](auto const* it) { return static_cast<int32_t>(self<Network>(it).outputs.size()); })
              .set(&V::getNbLayers, [](auto const* it) { return static_cast<int32_t>(self<Network>(it).outputs.size()); })
              .set(&V::getInput,
                  [](auto const* it, int32_t index) -> ITensor* {
                      return self<Network>(it).inputs[static_cast<size_t>(index)].get();
                  })
              .set(&V::getOutput,
                  [](auto const* it, int32_t index) -> ITensor* {
                      return self<Network>(it).outputs[static_cast<size_t>(index)].get();
                  })
              .set(&V::getLayer, [](auto const*, int32_t) -> ILayer* {
                  struct Layer
                  {
                      void* const* table;
                  };
                  struct LayerShell final : ILayer
                  {
                      explicit LayerShell(Layer* layer)
                      {
                          this->mLayer = reinterpret_cast<apiv::VLayer*>(layer);
                      }
                  };
                  static Table<apiv::VLayer> const layers
                      = Table<apiv::VLayer>{}.set(&apiv::VLayer::getType, [](auto const*) { return LayerType::kSHUFFLE; });
                  static Layer only{layers.get()};
                  static LayerShell shell{&only};
                  return &shell;
              });
    return new Shell<INetworkDefinition, V, Network>(std::make_shared<Network>(Network{table.get()}));
}

Network& networkOf(INetworkDefinition& network)
{
    return *static_cast<Shell<INetworkDefinition, apiv::VNetworkDefinition, Network>&>(network).impl;
}

struct Parser
{
    void* const* table;
    INetworkDefinition* network;
    ILogger* logger;
};

// Reads fields of a protobuf message; `take` is called with the number of each field and its bytes or its value.
template <class F>
void readFields(std::string_view bytes, F take)
{
    size_t at = 0;
    auto varint = [&] {
        uint64_t value = 0;
        for (int shift = 0; at < bytes.size(); shift += 7)
        {
            auto const byte = static_cast<uint8_t>(bytes[at++]);
            value |= static_cast<uint64_t>(byte & 127U) << shift;
            if (byte < 128)
            {
                break;
            }
        }
        return value;
    };
    while (at < bytes.size())
    {
        uint64_t const key = varint();
        uint64_t const kind = key & 7U;
        uint64_t value = kind == 0 ? varint() : 0;
        size_t const length = kind == 2 ? varint() : kind == 1 ? 8 : kind == 5 ? 4 : 0;
        take(key >> 3U, kind == 0 ? std::string_view{} : bytes.substr(at, length), value);
        at += length;
    }
}

DataType toDataType(uint64_t onnx)
{
    static std::map<uint64_t, DataType> const types{{1, DataType::kFLOAT}, {2, DataType::kUINT8}, {3, DataType::kINT8},
        {6, DataType::kINT32}, {7, DataType::kINT64}, {9, DataType::kBOOL}, {10, DataType::kHALF}, {16, DataType::kBF16}};
    return types.at(onnx);
}

// Reads a ValueInfoProto; `free` collects the names of free sizes of inputs.
Tensor readValue(std::string_view bytes, bool input, std::set<std::string>& free)
{
    Tensor tensor{input, {}, DataType::kFLOAT, {}};
    auto dim = [&](auto, std::string_view text, uint64_t value) {
        bool const known = !input && !free.count(std::string(text));
        tensor.dims.push_back(text.empty() ? static_cast<int64_t>(value) : known ? -2 : -1);
        if (input && !text.empty())
        {
            free.emplace(text);
        }
    };
    auto shape = [&](uint64_t field, std::string_view text, uint64_t) {
        field == 1 ? readFields(text, dim) : void();
    };
    auto type = [&](uint64_t field, std::string_view text, uint64_t value) {
        field == 1 ? void(tensor.type = toDataType(value)) : field == 2 ? readFields(text, shape) : void();
    };
    auto kind = [&](uint64_t field, std::string_view text, uint64_t) {
        field == 1 ? readFields(text, type) : void();
    };
    readFields(bytes, [&](uint64_t field, std::string_view text, uint64_t) {
        field == 1 ? void(tensor.name = text) : field == 2 ? readFields(text, kind) : void();
    });
    return tensor;
}

bool parseFile(Parser& parser, char const* path)
{
    std::ifstream file(path, std::ios::binary);
    std::string const model{std::istreambuf_iterator<char>(file), {}};
    if (fault("parse") || model.empty())
    {
        return false;
    }
    auto& network = networkOf(*parser.network);
    std::set<std::string> free;
    auto node = [&](std::string_view bytes) {
        std::string name;
        std::string op;
        readFields(bytes, [&](uint64_t field, std::string_view text, uint64_t) {
            field == 3 ? void(name = text) : field == 4 ? void(op = text) : void();
        });
        if (op == "MatMul" || op == "Gemm" || op == "Conv")
        {
            network.products.push_back(name);
        }
    };
    auto weight = [&](uint64_t field, std::string_view text, uint64_t) {
        network.weightBytes += field == 4 || field == 9 ? text.size() : 0; // float_data or raw_data of a TensorProto
    };
    auto graph = [&](uint64_t field, std::string_view text, uint64_t) {
        field == 5 ? readFields(text, weight) : field == 1 ? node(text) : field == 11 ? network.inputs.push_back(makeTensor(readValue(text, true, free))) : void();
    };
    auto results = [&](uint64_t field, std::string_view text, uint64_t) {
        field == 12 ? network.outputs.push_back(makeTensor(readValue(text, false, free))) : void();
    };
    readFields(model, [&](uint64_t field, std::string_view text, uint64_t) {
        if (field == 7) // inputs first: a protobuf may have them in any order
        {
            readFields(text, graph);
            readFields(text, results);
        }
    });
    return true;
}

// The dump of layers in the form of this version.
std::string dumpLayers(Network const& network)
{
    bool const half = network.inputs.front()->getType() == DataType::kHALF && !fault("wide");
    std::string const type = half ? "Half" : "Float";
#if NV_TENSORRT_MAJOR < 11
    std::string const field = "Format/Datatype: " + type + " }";
    std::string const constant = ", { Name: __mye1_dconst, Dimensions: [1,1], " + field + "], Outputs: [ ";
    std::string const ends = "\nBindings:\n" + std::string(network.inputs.front()->getName()) + "\n";
#else
    std::string const field = "Strides: [1,1], Datatype: " + type + ", Format: (Linear) Row major linear format }";
    std::string const constant = "], Constants: [ { Name: __mye1_dconst, Dimensions: [1,1], " + field + "], Outputs: [ ";
    std::string const ends = "I/O Tensors:\n Name: " + std::string(network.inputs.front()->getName()) + ", IOMode: Input\n";
#endif
    std::string text = "Layers:\n";
    for (auto const& name : network.products)
    {
        std::string const tensor = "{ Name: t, Dimensions: [-1,1], " + field;
        text += "Name: " + name + "_myl0_0, LayerType: gemm, Inputs: [ " + tensor + constant + tensor
            + "], TacticName: none, StreamId: 0, Metadata: [ONNX Layer: " + name + "]\n";
    }
    return text + ends;
}

// --- Builder ---------------------------------------------------------------------------------------------------------

struct Profile
{
    void* const* table;
    std::map<std::string, std::vector<Dims>> shapes{};
};

IOptimizationProfile* makeProfile()
{
    using V = apiv::VOptimizationProfile;
    static Table<V> const table
        = Table<V>{}
              .set(&V::setDimensions,
                  [](auto* it, char const* name, OptProfileSelector select, Dims const& dims) {
                      auto& shapes = self<Profile>(it).shapes[name];
                      shapes.resize(3);
                      shapes[static_cast<size_t>(select)] = dims;
                      return true;
                  })
              .set(&V::isValid, [](auto const*) { return true; });
    return new Shell<IOptimizationProfile, V, Profile>(std::make_shared<Profile>(Profile{table.get()}));
}

struct TimingCache
{
    void* const* table;
    std::string text;
};

ITimingCache* makeTimingCache(std::string text)
{
    using V = apiv::VTimingCache;
    static Table<V> const table
        = Table<V>{}
              .set(&V::serialize, [](auto const* it) { return hostMemory(self<TimingCache>(it).text); })
              .set(&V::combine, [](auto*, ITimingCache const&, bool) { return true; })
              .set(&V::queryKeys, [](auto const*, TimingCacheKey*, int64_t) { return int64_t{0}; });
    bool const ours = text.compare(0, 6, "cache ") == 0;
    return new Shell<ITimingCache, V, TimingCache>(
        std::make_shared<TimingCache>(TimingCache{table.get(), ours ? std::move(text) : "cache "}));
}

struct BuilderConfig
{
    void* const* table;
    uint32_t flags = 1U << static_cast<uint32_t>(BuilderFlag::kTF32);
    std::map<MemoryPoolType, size_t> limits{};
    std::vector<Profile const*> profiles{};
    IProgressMonitor* monitor = nullptr;
    ITimingCache const* cache = nullptr;
    ProfilingVerbosity verbosity = ProfilingVerbosity::kLAYER_NAMES_ONLY;
};

using BuilderConfigShell = Shell<IBuilderConfig, apiv::VBuilderConfig, BuilderConfig>;

IBuilderConfig* makeBuilderConfig()
{
    using V = apiv::VBuilderConfig;
    static Table<V> const table
        = Table<V>{}
              .set(&V::setFlag, [](auto* it, BuilderFlag flag) { self<BuilderConfig>(it).flags |= 1U << static_cast<uint32_t>(flag); })
              .set(&V::clearFlag,
                  [](auto* it, BuilderFlag flag) { self<BuilderConfig>(it).flags &= ~(1U << static_cast<uint32_t>(flag)); })
              .set(&V::getFlag,
                  [](auto const* it, BuilderFlag flag) {
                      return (self<BuilderConfig>(it).flags >> static_cast<uint32_t>(flag) & 1U) != 0;
                  })
              .set(&V::setMemoryPoolLimit,
                  [](auto* it, MemoryPoolType pool, size_t limit) { self<BuilderConfig>(it).limits[pool] = limit; })
              .set(&V::getMemoryPoolLimit,
                  [](auto const* it, MemoryPoolType pool) {
                      auto const& limits = self<BuilderConfig>(it).limits;
                      return limits.count(pool) ? limits.at(pool) : size_t{1} << 30;
                  })
              .set(&V::setProgressMonitor, [](auto* it, IProgressMonitor* monitor) { self<BuilderConfig>(it).monitor = monitor; })
              .set(&V::getProgressMonitor, [](auto const* it) { return self<BuilderConfig>(it).monitor; })
              .set(&V::setProfilingVerbosity,
                  [](auto* it, ProfilingVerbosity verbosity) { self<BuilderConfig>(it).verbosity = verbosity; })
              .set(&V::getProfilingVerbosity, [](auto const* it) { return self<BuilderConfig>(it).verbosity; })
              .set(&V::addOptimizationProfile,
                  [](auto* it, IOptimizationProfile const* profile) {
                      auto const* shell = static_cast<Shell<IOptimizationProfile, apiv::VOptimizationProfile, Profile> const*>(profile);
                      self<BuilderConfig>(it).profiles.push_back(shell->impl.get());
                      return static_cast<int32_t>(self<BuilderConfig>(it).profiles.size()) - 1;
                  })
              .set(&V::createTimingCache,
                  [](auto const*, void const* blob, size_t size) {
                      return makeTimingCache({static_cast<char const*>(blob), size});
                  })
              .set(&V::setTimingCache, [](auto* it, ITimingCache const& cache, bool) {
                  self<BuilderConfig>(it).cache = &cache;
                  return true;
              });
    return new BuilderConfigShell(std::make_shared<BuilderConfig>(BuilderConfig{table.get()}));
}

struct Builder
{
    void* const* table;
    ILogger* logger;
    IGpuAllocator* allocator = nullptr;
};

IHostMemory* buildPlan(Builder& builder, Network& network, BuilderConfig& config)
{
    auto* log = builder.logger;
    void* scratch = builder.allocator ? builder.allocator->allocateAsync(1 << 20, 256, 0, nullptr) : nullptr;
    bool goes = true;
    if (config.monitor)
    {
        config.monitor->phaseStart("Building Engine", nullptr, 2);
        for (int32_t step = 0; step < 2 && goes; ++step)
        {
            goes = config.monitor->stepComplete("Building Engine", step);
        }
        config.monitor->phaseFinish("Building Engine");
    }
    if (builder.allocator && (!scratch || !builder.allocator->deallocateAsync(scratch, nullptr)))
    {
        say(log, ILogger::Severity::kERROR, "Error Code 2: OutOfMemory (Requested size was 1048576 bytes.)");
        goes = false;
    }
    if (fault("build"))
    {
        say(log, ILogger::Severity::kERROR, "Error Code 10: Internal Error (Could not find any implementation for node first.)");
        goes = false;
    }
    if (!goes)
    {
        return nullptr;
    }
    std::ostringstream plan;
    plan << "stub " << network.weightBytes << '\n';
    int64_t largest = 1;
    for (auto const* side : {&network.inputs, &network.outputs})
    {
        for (auto const& shell : *side)
        {
            auto const& tensor = shell->impl->tensor;
            plan << (tensor.input ? "input " : "output ") << tensor.name << ' ' << static_cast<int32_t>(tensor.type);
            for (int64_t size : tensor.dims)
            {
                plan << ' ' << size;
            }
            for (size_t i = 0; tensor.input && tensor.dims[0] == -1 && i < config.profiles.size(); ++i)
            {
                plan << (i ? "" : " range");
                for (auto const& dims : config.profiles[i]->shapes.at(tensor.name))
                {
                    plan << ' ' << dims.d[0];
                    largest = std::max<int64_t>(largest, dims.d[0]);
                }
            }
            plan << '\n';
        }
    }
    std::string const layers = dumpLayers(network);
    plan << layers;
    say(log, ILogger::Severity::kINFO, "Total Weights Memory: " + std::to_string(network.weightBytes) + " bytes");
    say(log, ILogger::Severity::kINFO, "Total Activation Memory: " + std::to_string(kBYTES_PER_SAMPLE * largest) + " bytes");
    say(log, ILogger::Severity::kVERBOSE, layers);
    return hostMemory(plan.str());
}

} // namespace

#define STUB_API extern "C" __attribute__((visibility("default")))

STUB_API void* createInferRuntime_INTERNAL(void* logger, int32_t) noexcept
{
    using V = apiv::VRuntime;
    using Open = ICudaEngine* (V::*)(void const*, size_t) noexcept;
    static Table<V> const table
        = Table<V>{}
              .set(static_cast<Open>(&V::deserializeCudaEngine),
                  [](auto* it, void const* blob, size_t size) {
                      auto& runtime = self<Runtime>(it);
                      return makeEngine(runtime.logger, runtime.allocator, {static_cast<char const*>(blob), size});
                  })
              .set(&V::setGpuAllocator, [](auto* it, IGpuAllocator* allocator) { self<Runtime>(it).allocator = allocator; })
              .set(&V::getLogger, [](auto const* it) { return self<Runtime>(it).logger; })
              .set(&V::setEngineHostCodeAllowed, [](auto* it, bool allowed) { self<Runtime>(it).hostCode = allowed; })
              .set(&V::getEngineHostCodeAllowed, [](auto const* it) { return self<Runtime>(it).hostCode; });
    auto made = std::make_shared<Runtime>(Runtime{table.get(), static_cast<ILogger*>(logger)});
    return static_cast<IRuntime*>(new Shell<IRuntime, V, Runtime>(made));
}

STUB_API void* createInferBuilder_INTERNAL(void* logger, int32_t) noexcept
{
    using V = apiv::VBuilder;
    static Table<V> const table
        = Table<V>{}
              .set(&V::setGpuAllocator, [](auto* it, IGpuAllocator* allocator) { self<Builder>(it).allocator = allocator; })
              .set(&V::createBuilderConfig, [](auto*) { return makeBuilderConfig(); })
              .set(&V::createNetworkV2, [](auto*, NetworkDefinitionCreationFlags) { return makeNetwork(); })
              .set(&V::createOptimizationProfile, [](auto*) { return makeProfile(); })
              .set(&V::getLogger, [](auto const* it) { return self<Builder>(it).logger; })
              .set(&V::buildSerializedNetwork, [](auto* it, INetworkDefinition& network, IBuilderConfig& config) {
                  return buildPlan(self<Builder>(it), networkOf(network), *static_cast<BuilderConfigShell&>(config).impl);
              });
    auto made = std::make_shared<Builder>(Builder{table.get(), static_cast<ILogger*>(logger)});
    return static_cast<IBuilder*>(new Shell<IBuilder, V, Builder>(made));
}

STUB_API void* createNvOnnxParser_INTERNAL(void* network, void* logger, int) noexcept
{
    using V = nvonnxparser::IParser;
    static Table<V> const table
        = Table<V>{}
              .set(&V::parseFromFile, [](auto* it, char const* path, int) { return parseFile(self<Parser>(it), path); })
              .set(&V::getNbErrors, [](auto const*) { return 0; })
              .destructorAfter(&V::clearErrors);
    return new Parser{table.get(), static_cast<INetworkDefinition*>(network), static_cast<ILogger*>(logger)};
}

STUB_API void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int) noexcept
{
    return nullptr;
}

STUB_API void* createInferRefitter_INTERNAL(void*, void*, int32_t) noexcept
{
    return nullptr;
}

STUB_API int getNvOnnxParserVersion() noexcept
{
    return 0;
}

STUB_API bool initLibNvInferPlugins(void*, char const*)
{
    return true;
}

STUB_API IPluginRegistry* getPluginRegistry() noexcept
{
    return nullptr;
}

STUB_API IPluginRegistry* getBuilderPluginRegistry(EngineCapability) noexcept
{
    return nullptr;
}
