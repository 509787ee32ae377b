// The few single operators that torch_npu's own C++ launches (inside ProcessGroupHCCL); all others fail by name.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "simulator.hpp"

struct aclTensorDesc {
  aclDataType dtype;
  std::vector<int64_t> dims;
  aclFormat format;
};
struct aclDataBuffer {
  void* data;
  size_t size;
};
struct aclopAttr {};

namespace {

size_t numel(const aclTensorDesc* desc) {
  size_t product = 1;
  for (int64_t dim : desc->dims) product *= static_cast<size_t>(dim);
  return product;
}

size_t width(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
    case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
    case ACL_DOUBLE: case ACL_INT64: case ACL_UINT64: return 8;
    default: return 1;
  }
}

double read(const void* at, size_t i, aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return static_cast<const float*>(at)[i];
    case ACL_DOUBLE: return static_cast<const double*>(at)[i];
    case ACL_INT8: return static_cast<const int8_t*>(at)[i];
    case ACL_UINT8: case ACL_BOOL: return static_cast<const uint8_t*>(at)[i];
    case ACL_INT16: return static_cast<const int16_t*>(at)[i];
    case ACL_INT32: return static_cast<const int32_t*>(at)[i];
    case ACL_INT64: return static_cast<double>(static_cast<const int64_t*>(at)[i]);
    default: return NAN;
  }
}

bool write(void* at, size_t i, aclDataType dtype, double value) {
  switch (dtype) {
    case ACL_FLOAT: static_cast<float*>(at)[i] = static_cast<float>(value); return true;
    case ACL_DOUBLE: static_cast<double*>(at)[i] = value; return true;
    case ACL_INT8: static_cast<int8_t*>(at)[i] = static_cast<int8_t>(value); return true;
    case ACL_UINT8: static_cast<uint8_t*>(at)[i] = static_cast<uint8_t>(value); return true;
    case ACL_BOOL: static_cast<uint8_t*>(at)[i] = value != 0; return true;
    case ACL_INT16: static_cast<int16_t*>(at)[i] = static_cast<int16_t>(value); return true;
    case ACL_INT32: static_cast<int32_t*>(at)[i] = static_cast<int32_t>(value); return true;
    case ACL_INT64: static_cast<int64_t*>(at)[i] = static_cast<int64_t>(value); return true;
    default: return false;
  }
}

struct Tensor {
  void* data;
  aclDataType dtype;
  size_t numel;
  size_t width;  // bytes of an element
};

aclError cast(const Tensor& from, const Tensor& to) {
  for (size_t i = 0; i < to.numel; i++) {
    const double value = read(from.data, i, from.dtype);
    if (std::isnan(value) && from.dtype != ACL_FLOAT && from.dtype != ACL_DOUBLE)
      return sim::fail(sim::kTaskFailed, "simulated Cast: from dtype " + std::to_string(from.dtype));
    if (!write(to.data, i, to.dtype, value))
      return sim::fail(sim::kTaskFailed, "simulated Cast: to dtype " + std::to_string(to.dtype));
  }
  return ACL_SUCCESS;
}

// An n-dimensional tensor with `edges` (before and after each axis) of `value` around it.
aclError pad(const Tensor& from, const Tensor& to, std::vector<int64_t> dims, std::vector<int64_t> edges, double value) {
  for (size_t i = 0; i < to.numel; i++) {
    size_t rest = i, place = 0, step = 1;
    bool inside = true;
    for (size_t axis = dims.size(); axis-- > 0;) {
      const int64_t width = edges[2 * axis] + dims[axis] + edges[2 * axis + 1];
      const int64_t at = static_cast<int64_t>(rest % static_cast<size_t>(width)) - edges[2 * axis];
      rest /= static_cast<size_t>(width);
      inside = inside && at >= 0 && at < dims[axis];
      place += static_cast<size_t>(std::max<int64_t>(at, 0)) * step;
      step *= static_cast<size_t>(dims[axis]);
    }
    const size_t size = to.width;
    if (inside) memcpy(static_cast<char*>(to.data) + i * size, static_cast<char*>(from.data) + place * size, size);
    else if (value == 0) memset(static_cast<char*>(to.data) + i * size, 0, size);
    else write(to.data, i, to.dtype, value);
  }
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{dtype, std::vector<int64_t>(dims, dims + count), format};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) { desc->format = format; return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }  // the storage's shape
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->dtype; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->dims.size()) return ACL_ERROR_INVALID_PARAM;
  *size = desc->dims[index];
  return ACL_SUCCESS;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) { return new aclDataBuffer{data, size}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) { delete buffer; return ACL_SUCCESS; }

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) { return ACL_SUCCESS; }

aclError aclopCompileAndExecuteV2(const char* type, int inputs, aclTensorDesc* in_desc[], aclDataBuffer* in[], int outputs,
                                  aclTensorDesc* out_desc[], aclDataBuffer* out[], aclopAttr*, aclopEngineType,
                                  aclopCompileType, const char*, aclrtStream handle) {
  const std::string name = type;
  sim::count("aclop " + name);
  sim::Stream* stream = sim::stream_of(handle);
  if (!stream) return sim::kNoContext;
  if (outputs != 1 || inputs < 1 || (name != "Cast" && name != "Identity" && name != "Fill" && name != "PadV3"))
    return sim::fail(ACL_ERROR_OP_NOT_FOUND, "operator " + name + " is not simulated: register a kernel for it");
  auto tensor = [](const aclTensorDesc* desc, const aclDataBuffer* buffer) {
    return Tensor{buffer->data, desc->dtype, numel(desc), width(desc->dtype)};
  };
  const Tensor to = tensor(out_desc[0], out[0]);
  const int source = name == "Fill" ? 1 : 0;
  const Tensor from = tensor(in_desc[source], in[source]);
  const size_t bytes = std::min(in[source]->size, out[0]->size);
  if (name == "Cast") stream->enqueue([=] { return cast(from, to); });
  else if (name == "PadV3") {
    std::vector<int64_t> edges;  // the host's arguments may be gone later
    const Tensor given = tensor(in_desc[1], in[1]);
    for (size_t i = 0; i < given.numel; i++) edges.push_back(static_cast<int64_t>(read(given.data, i, given.dtype)));
    const double value = inputs > 2 ? read(in[2]->data, 0, in_desc[2]->dtype) : 0;
    const std::vector<int64_t> dims = in_desc[0]->dims;
    if (edges.size() != 2 * dims.size()) return sim::fail(ACL_ERROR_INVALID_PARAM, "PadV3 with other paddings than axes");
    stream->enqueue([=] { return pad(from, to, dims, edges, value); });
  } else if (name == "Identity") stream->enqueue([=] { memmove(to.data, from.data, bytes); return ACL_SUCCESS; });
  else {
    const double value = read(from.data, 0, from.dtype);  // the host's scalar may be gone later
    stream->enqueue([=] {
      for (size_t i = 0; i < to.numel; i++) write(to.data, i, to.dtype, value);
      return ACL_SUCCESS;
    });
  }
  return ACL_SUCCESS;
}

aclError aclopCompileAndExecute(const char* type, int inputs, const aclTensorDesc* const in_desc[],
                                const aclDataBuffer* const in[], int outputs, const aclTensorDesc* const out_desc[],
                                aclDataBuffer* const out[], const aclopAttr* attr, aclopEngineType engine,
                                aclopCompileType compile, const char* path, aclrtStream stream) {
  return aclopCompileAndExecuteV2(type, inputs, const_cast<aclTensorDesc**>(in_desc), const_cast<aclDataBuffer**>(in),
                                  outputs, const_cast<aclTensorDesc**>(out_desc), const_cast<aclDataBuffer**>(out),
                                  const_cast<aclopAttr*>(attr), engine, compile, path, stream);
}

// Asked for at load time, of no use here: a call of one that matters is told as unsupported.
aclError aclmdlInitDump() { return sim::kUnsupported; }
aclError aclmdlSetDump(const char*) { return sim::kUnsupported; }
aclError aclmdlFinalizeDump() { return sim::kUnsupported; }
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) { return sim::kUnsupported; }
aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) { return sim::kUnsupported; }
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return sim::kUnsupported; }
aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) { return sim::kUnsupported; }
aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char*, aclrtFuncHandle*) { return sim::kUnsupported; }
aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) { return sim::kUnsupported; }
int rtDevBinaryRegister(const void*, void**) { return sim::kUnsupported; }
int rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) { return sim::kUnsupported; }
int rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return sim::kUnsupported; }
int rtKernelLaunch(const void*, uint32_t, void*, uint32_t, void*, void*) { return sim::kUnsupported; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofSysCycleTime() { return 0; }

}  // extern "C"
