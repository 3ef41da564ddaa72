//! Link options of libthermalloc.so.
fn main() {
    for arg in [
        "-Wl,-soname,libthermalloc.so.0",
        // Blocks, and the threads' cache pointers, outlive any dlclose.
        "-Wl,-z,nodelete",
        "-Wl,-z,relro,-z,now",
        "-Wl,-z,noexecstack",
        "-Wl,-z,text",
    ] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
