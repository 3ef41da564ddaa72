//! The table through which device libraries and tools find this library in their process: by a
//! weak reference to `thermalloc_host_v1`, or by `dlsym`.

use thermalloc_core::control::host::HostTable;

#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the C name")]
static thermalloc_host_v1: HostTable = HostTable::this();
