//! Compresses the tables of tuned plans to a twelfth, which the crate embeds.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=tuned");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for table in ["h200", "predicted", "sweep"] {
        let text = std::fs::read(format!("tuned/{table}.jsonl")).expect("the table is part of the crate");
        let compressed = miniz_oxide::deflate::compress_to_vec(&text, 9);
        std::fs::write(out.join(table), compressed).expect("the build's own folder can be written");
    }
}
