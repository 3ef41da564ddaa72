//! libthermalloc's ledger, where the process has it: what the driver gave to whom stands beside host
//! memory there. What the device pool takes does not: it enters its own blocks.

use crate::find;
use crate::ledger::Kind;
use std::sync::OnceLock;
use thermalloc::control::host::{DeviceBlock, HostTable};

fn table() -> Option<&'static HostTable> {
    static TABLE: OnceLock<Option<&'static HostTable>> = OnceLock::new();
    *TABLE.get_or_init(|| {
        let symbol = find::next_dlsym(libc::RTLD_DEFAULT, c"thermalloc_host_v1".as_ptr());
        // SAFETY: the symbol is that of the host library, which is never unloaded.
        unsafe { HostTable::from_ptr(symbol.cast()) }
    })
}

/// Enters memory; 0 where it is not recorded.
pub(crate) fn enter(kind: Kind, address: u64, bytes: u64, caller: &str) -> u64 {
    let Some(table) = table().filter(|_| !caller.starts_with("libthermalloc_cuda")) else {
        return 0;
    };
    let block = DeviceBlock {
        struct_bytes: size_of::<DeviceBlock>(),
        address,
        size: bytes,
        usable: bytes,
        stream: 0,
        // Which device is current the driver knows, and it is not asked for that.
        device: 0,
        space: match kind {
            Kind::Device | Kind::Pool | Kind::Physical => 1,
            Kind::Pinned => 2,
            Kind::Managed => 3,
        },
        user: std::ptr::null(),
        user_bytes: 0,
    };
    table.device_alloc(&block, caller)
}

/// Takes it off.
pub(crate) fn leave(handle: u64) {
    if handle != 0
        && let Some(table) = table()
    {
        table.device_free(handle, 0, false);
    }
}
