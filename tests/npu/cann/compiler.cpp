// libacl_op_compiler.so: options are remembered, graphs cannot be made.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "acl/acl_op_compiler.h"

namespace {
std::mutex mutex;
std::map<int, std::string> options;
}  // namespace

extern "C" {

aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  std::lock_guard<std::mutex> lock(mutex);
  options[option] = value;
  return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt option) {
  std::lock_guard<std::mutex> lock(mutex);
  return options[option].size() + 1;
}

aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
  std::lock_guard<std::mutex> lock(mutex);
  strncpy(value, options[option].c_str(), length);
  return ACL_SUCCESS;
}

aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }

aclError aclGenGraphAndDumpForOp(const char*, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                 const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                 const char*, const aclGraphDumpOption*) {
  return 207000;
}

}  // extern "C"
