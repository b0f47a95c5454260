//! Programs in C and C++ that include the header and link with the library.

use std::path::{Path, PathBuf};
use std::process::Command;

use flashcore_c::{CCall, COperand};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// A folder with the library under its soname and under the name that linkers look for.
fn libraries(test: &str) -> PathBuf {
    let built = std::env::current_exe().unwrap().parent().unwrap().join("libflashcore_c.so");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libflashcore_c.so", "libflashcore_c.so.1"] {
        let _ = std::fs::remove_file(folder.join(name));
        std::os::unix::fs::symlink(&built, folder.join(name)).unwrap();
    }
    folder
}

/// Compiles a source file and returns what the program prints.
fn run(compiler: &str, standard: &str, source: &Path, test: &str) -> String {
    let folder = libraries(test);
    let program = folder.join("program");
    let mut compile = Command::new(compiler);
    compile
        .args([standard, "-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-I"])
        .arg(Path::new(HERE).join("include"));
    compile.arg(source).arg("-o").arg(&program).arg("-L").arg(&folder);
    compile.arg(format!("-Wl,-rpath,{}", folder.display())).args(["-lflashcore_c", "-lm", "-ldl"]);
    let compiled = compile.output().unwrap_or_else(|error| panic!("cannot run {compiler}: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().unwrap();
    assert!(
        ran.status.success(),
        "{}{}",
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr)
    );
    String::from_utf8(ran.stdout).unwrap()
}

#[test]
fn the_example_in_c_agrees_with_a_plain_loop() {
    let printed = run("cc", "-std=c99", &Path::new(HERE).join("examples/attention.c"), "attention");
    assert!(printed.starts_with(concat!("FlashCore ", env!("CARGO_PKG_VERSION"))), "{printed}");
}

#[test]
fn the_example_in_cpp_reads_pages() {
    let printed = run("c++", "-std=c++17", &Path::new(HERE).join("examples/decode.cpp"), "decode");
    assert_eq!(printed, "keys in pages, in dense rows and appended give equal results\n");
}

#[test]
fn threads_and_a_forked_child_compute_the_same() {
    assert_eq!(run("cc", "-std=c11", &Path::new(HERE).join("tests/threads.c"), "threads"), "equal\n");
}

#[test]
fn the_example_of_the_overhead_runs() {
    let printed = run("cc", "-std=c11", &Path::new(HERE).join("examples/overhead.c"), "overhead");
    let names = ["on the CPU", "an empty function", "above an empty function"];
    for (line, name) in printed.lines().zip(names) {
        assert!(line.starts_with("MEASURE {") && line.contains(name) && line.ends_with("]}"), "{printed}");
    }
    assert_eq!(printed.lines().count(), names.len());
}

/// `cuda.h` is a file of the package of NVRTC's headers, beside the folder of the library.
#[test]
fn the_example_for_gpus_compiles() {
    let library = std::env::var_os("FLASHCORE_NVRTC").map(PathBuf::from);
    let headers = library.as_ref().and_then(|file| Some(file.parent()?.parent()?.join("include")));
    let Some(headers) = headers.filter(|folder| folder.join("cuda.h").is_file()) else {
        filetest::not_run("cuda.h, which is beside NVRTC, is not installed");
        return;
    };
    let mut compile = Command::new("cc");
    compile.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-isystem"]).arg(headers);
    compile.arg("-I").arg(Path::new(HERE).join("include")).arg(Path::new(HERE).join("examples/cuda.c"));
    let compiled = compile.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// The header's structs, as the C compiler lays them out, and its numbers.
#[test]
fn the_header_is_the_layout_of_the_library() {
    let folder = libraries("layout");
    let mut source = "#include <flashcore.h>\n#include <stddef.h>\nint main(void) { return 0; }\n".to_owned();
    let mut claim = |text: String| source.push_str(&format!("_Static_assert({text}, \"{text}\");\n"));
    macro_rules! fields {
        ($c:literal, $rust:ident: $($field:ident),*) => {
            claim(format!("sizeof({}) == {}", $c, size_of::<$rust>()));
            // A pattern with every field, so that a new one is not forgotten here.
            let _ = |all: $rust| { let $rust { $($field: _),* } = all; };
            $(claim(format!(
                "offsetof({}, {}) == {}", $c, stringify!($field), std::mem::offset_of!($rust, $field)
            ));)*
        };
    }
    fields!("flashcore_operand", COperand: operand, dtype, address, dimensions, shape, strides);
    fields!(
        "flashcore_call",
        CCall: size, error, error_size, operands, operand_count, pass, flags, device_type, device, stream,
        threads, keys_before, keys_after, scale, softcap, score, mask, floats, float_count, ints, int_count,
        longest_q, longest_k, scale_rows, reserved
    );
    for (name, number) in flashcore_c::numbers() {
        claim(format!("{name} == {number}"));
    }
    let file = folder.join("layout.c");
    std::fs::write(&file, source).unwrap();
    run("cc", "-std=c11", &file, "layout");
}
