//! Sets the name under which programs find the shared library: its number is that of the interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libflashcore_c.so.1");
}
