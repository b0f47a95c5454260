//! Checks of CUDA C++ sources, which NVRTC compiles.

use std::path::Path;
use std::process::Command;

use crate::cli::LAUNCH;
use crate::folder::{Folder, text};

/// With NVRTC (`cargo xtask test` fetches it) CUDA C++ is checked. Without NVRTC the message says how to get
/// it.
#[test]
fn cuda_sources_go_through_nvrtc() {
    let folder = Folder::new("cuda");
    let launch = folder.write("launch.toml", LAUNCH);
    let source = "extern \"C\" __global__ void twice(unsigned* x) { x[threadIdx.x] *= 2; }";
    let cuda = folder.write("twice.cu", source);
    let command = |library: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.args(["check", &cuda, "--launch", &launch]).current_dir(&folder.0);
        library.into_iter().for_each(|path| {
            command.env("FLASHCORE_NVRTC", path);
        });
        command.output().unwrap()
    };
    let absent = command(Some("/nonexistent/libnvrtc.so"));
    assert_eq!(absent.status.code(), Some(3));
    assert!(
        text(&absent.stderr)
            .contains("/nonexistent/libnvrtc.so, which FLASHCORE_NVRTC names, cannot be loaded"),
        "{}",
        text(&absent.stderr)
    );
    let found = command(None);
    match found.status.code() {
        Some(0) => assert!(text(&found.stdout).starts_with("passed")),
        _ => assert!(text(&found.stderr).contains("FLASHCORE_NVRTC"), "{}", text(&found.stderr)),
    }
}

/// The book's tutorial: its kernel fails with a race, and passes with the barrier that the tutorial adds.
#[test]
fn the_tutorial_s_kernel_fails_and_then_passes() {
    let page = std::fs::read_to_string("../../docs/src/guide/check.md").unwrap();
    let block = |language: &str| {
        let after = page.split_once(&format!("```{language}\n")).unwrap().1;
        after.split_once("```").unwrap().0.to_owned()
    };
    let (kernel, launch) = (block("cuda"), block("toml"));
    let fixed = kernel.replace("max = new_max;", "max = new_max;\n        __syncthreads();");
    assert_ne!(kernel, fixed);
    let folder = Folder::new("tutorial");
    let (launch, racy, fixed) = (
        folder.write("row.toml", &launch),
        folder.write("row.cu", &kernel),
        folder.write("fixed.cu", &fixed),
    );
    for (source, code, says) in [(racy, 1, "race at "), (fixed, 0, "after 14 runs in the emulator")] {
        let output = folder.run(&["check", &source, "--launch", &launch]);
        let no_tools = text(&output.stderr).contains("FLASHCORE_NVRTC");
        let right = output.status.code() == Some(code) && text(&output.stdout).contains(says);
        assert!(no_tools || right, "{}{}", text(&output.stdout), text(&output.stderr));
    }
}

/// Included files are searched in the folder of the source file, and messages name the file.
#[test]
fn cuda_sources_include_what_lies_beside_them() {
    let folder = Folder::new("beside");
    let launch = folder.write("launch.toml", LAUNCH);
    std::fs::create_dir(folder.0.join("src")).unwrap();
    folder.write("src/twice.cuh", "__device__ unsigned twice(unsigned x) { return 2 * x; }");
    let kernel =
        "extern \"C\" __global__ void scale(unsigned* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }";
    folder.write("src/scale.cu", &format!("#include \"twice.cuh\"\n{kernel}"));
    folder.write("src/lonely.cu", &format!("#include \"none.cuh\"\n{kernel}"));
    let found = folder.run(&["check", "src/scale.cu", "--launch", &launch]);
    let no_tools = text(&found.stderr).contains("FLASHCORE_NVRTC");
    assert!(no_tools || text(&found.stdout).starts_with("passed"), "{}", text(&found.stderr));
    let lonely = folder.run(&["check", "src/lonely.cu", "--launch", &launch]);
    let error = text(&lonely.stderr);
    assert_eq!(lonely.status.code(), Some(3));
    assert!(no_tools || error.contains("src/lonely.cu(1)") && error.contains("none.cuh"), "{error}");
}

/// `cuda_fp16.h` and `mma.h` are installed with NVRTC. If they are missing, the message names the header and
/// says how to get it.
#[test]
fn cuda_headers_are_found_beside_nvrtc() {
    let folder = Folder::new("headers");
    let launch = folder.write("launch.toml", LAUNCH);
    let source = "#include <cuda_fp16.h>\n#include <mma.h>\n\
        extern \"C\" __global__ void twice(unsigned* x) {\n\
        __half h = __float2half(float(threadIdx.x));\n\
        nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sum;\n\
        nvcuda::wmma::fill_fragment(sum, 1.0f);\n\
        x[threadIdx.x] = unsigned(__half2float(__hadd(h, h)) * sum.x[0]);\n}";
    let cuda = folder.write("halves.cu", source);
    let command = |include: Option<&Path>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.args(["check", &cuda, "--launch", &launch]).current_dir(&folder.0);
        include.into_iter().for_each(|path| {
            command.env("FLASHCORE_CUDA_INCLUDE", path);
        });
        command.output().unwrap()
    };
    let found = command(None);
    let no_tools = text(&found.stderr).contains("FLASHCORE_NVRTC");
    assert!(no_tools || text(&found.stdout).starts_with("passed"), "{}", text(&found.stderr));
    let without = command(Some(&folder.0));
    let error = text(&without.stderr);
    assert_eq!(without.status.code(), Some(3));
    assert!(no_tools || error.contains("<cuda_fp16.h>") && error.contains("nvidia-cuda-runtime"), "{error}");
}
