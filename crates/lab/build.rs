//! Records the compiler's version, which stands beside every figure measured with native kernels.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = Command::new(rustc).arg("--version").output().ok();
    let version = version.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default();
    println!("cargo:rustc-env=FLASHCORE_RUSTC={version}");
    println!("cargo:rerun-if-changed=build.rs");
}
