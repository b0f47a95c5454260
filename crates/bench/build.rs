//! Records two facts for the program: the version of the compiler, which is stored with every figure measured
//! with native kernels, and the commit that `cargo xtask evidence` builds, because a program may run where
//! there is no repository.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = Command::new(rustc).arg("--version").output().ok();
    let version = version.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default();
    println!("cargo:rustc-env=FLASHCORE_RUSTC={version}");
    println!("cargo:rustc-env=FLASHCORE_COMMIT={}", std::env::var("FLASHCORE_COMMIT").unwrap_or_default());
    println!("cargo:rerun-if-env-changed=FLASHCORE_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
}
