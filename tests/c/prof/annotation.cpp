// A library of TensorFlow's name with its accessor, for what the profiler asks of the stock wheel.
#include <cstdint>
#include <functional>
#include <string_view>

namespace tsl::profiler {
struct MemoryDebugAnnotation {
  std::string_view pending_op_name;
  int64_t pending_step_id = 0;
  std::string_view pending_region_type;
  int32_t pending_data_type = 0;
  std::function<const char *()> pending_shape_func;
};

class ScopedMemoryDebugAnnotation {
 public:
  static const MemoryDebugAnnotation &ThreadMemoryDebugAnnotation();
};

static MemoryDebugAnnotation &annotation() {
  static thread_local MemoryDebugAnnotation annotation;
  return annotation;
}

const MemoryDebugAnnotation &ScopedMemoryDebugAnnotation::ThreadMemoryDebugAnnotation() {
  return annotation();
}
}  // namespace tsl::profiler

extern "C" void annotate(const char *op, int64_t step, const char *region, int32_t dtype) {
  auto &a = tsl::profiler::annotation();
  a.pending_op_name = op;
  a.pending_step_id = step;
  a.pending_region_type = region;
  a.pending_data_type = dtype;
}
