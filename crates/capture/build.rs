//! Compiles the library that other programs load (`src/preload`) into one file, which the crate embeds
//! compressed. So the command needs no second file, however it was installed.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=src/preload");
    println!("cargo::rerun-if-changed=src/protocol.rs");
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let library = Path::new(&variable("OUT_DIR")).join("libflashcore_capture.so");
    let compressed = library.with_extension("so.deflate");
    let is_known = matches!(variable("CARGO_CFG_TARGET_ARCH").as_str(), "x86_64" | "aarch64");
    if variable("CARGO_CFG_TARGET_OS") != "linux" || variable("CARGO_CFG_TARGET_ENV") != "gnu" || !is_known {
        std::fs::write(compressed, []).expect("the build's own folder can be written");
        return;
    }
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--crate-name", "flashcore_capture_preload", "--crate-type", "cdylib", "--edition", "2024"]);
    rustc.args(["-C", "opt-level=z", "-C", "lto=fat", "-C", "codegen-units=1", "-C", "strip=symbols"]);
    rustc.args(["--target", &variable("TARGET")]);
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={linker}"));
    }
    let status = rustc.arg("src/preload/lib.rs").arg("-o").arg(&library).status();
    assert!(status.is_ok_and(|status| status.success()), "the library for LD_PRELOAD does not compile");
    let bytes = std::fs::read(&library).expect("rustc wrote the library");
    let bytes = miniz_oxide::deflate::compress_to_vec(&bytes, 9);
    std::fs::write(compressed, bytes).expect("the build's own folder can be written");
}
