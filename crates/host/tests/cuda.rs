//! Tests that NVRTC, where installed, compiles CUDA files that contain host code.

use flashcore_host::cuda::{Options, Source, compile_files, templates};
use flashcore_host::store::Scratch;
use flashcore_host::tools::{Compiled, NvrtcError};

const FILE: &str = r#"#include <stdio.h>
#include <cstdint>
#include <vector>
#include <algorithm>
#include <cassert>
#include <unknown_library/all.h>
#include <cuda_runtime.h>
#include "part.cuh"

struct Timer { cudaEvent_t start; library::Handle handle; };

template <typename T, int N>
__global__ void __launch_bounds__(N) scale(const T* x, T* y, uint32_t n) {
    uint32_t i = blockIdx.x * N + threadIdx.x;
    assert(n > 0);
    if (i < n) y[i] = twice(x[i]) * T(FACTOR) + T(std::max(0.0f, 1.0f));
}

inline float half_of(float x) { return x / 2; }

static double seconds() { return library::now(); }

__global__ void plain(float* x) { x[threadIdx.x] = half_of(x[threadIdx.x]); }

int main(int argc, char** argv) {
    std::vector<float> host(100);
    scale<float, 32><<<4, 32>>>(nullptr, nullptr, 100);
    plain<<<1, 32>>>(nullptr);
    printf("%f\n", seconds());
}
"#;

const PART: &str = "#pragma once\n#include <vector>\ninline void show(library::Handle handle) { handle.show(); }\n\
    template <typename T> __device__ T twice(T x) { return x + x; }\n";

/// Compiles files in a scratch folder. Returns `None` without NVRTC.
fn compile(files: &[(&str, &str)], options: Options) -> Option<Result<Compiled, String>> {
    let scratch = Scratch::new().unwrap();
    let mut sources = Vec::new();
    for (name, text) in files {
        let file = scratch.path(name);
        std::fs::write(&file, text).unwrap();
        if name.ends_with(".cu") {
            sources.push(Source { file, text: (*text).to_owned() });
        }
    }
    match compile_files(&sources, &Options { arch: "compute_80".to_owned(), ..options }) {
        Err(NvrtcError::NotFound) => {
            eprintln!("not run: NVRTC is missing");
            None
        }
        found => Some(found.map_err(|error| error.to_string())),
    }
}

#[test]
fn host_code_templates_and_unknown_headers_do_not_matter() {
    let instance = "scale<float, 32>".to_owned();
    let options = || Options {
        define: vec!["FACTOR=3".to_owned()],
        instantiate: vec![instance.clone()],
        ..Options::default()
    };
    let Some(found) = compile(&[("scale.cu", FILE), ("part.cuh", PART)], options()) else { return };
    let compiled = found.unwrap();
    let name = &compiled.names[&instance];
    assert!(name.contains("scale") && compiled.ptx.contains(&format!(".entry {name}(")), "{}", compiled.ptx);
    assert!(compiled.ptx.contains(".entry _Z5plainPf("), "helpers without a mark are device code");
    assert!(!compiled.ptx.contains("cudaLaunch") && !compiled.ptx.contains("seconds"), "{}", compiled.ptx);
    let source = Source { file: "scale.cu".into(), text: FILE.to_owned() };
    assert_eq!(templates(&[source]), (vec!["scale".to_owned()], vec![instance.clone()]));
    let lost = compile(&[("scale.cu", FILE)], options()).unwrap().unwrap_err();
    assert!(lost.contains("part.cuh"), "{lost}");
}

#[test]
fn several_files_become_one() {
    let files = [
        ("one.cu", "__device__ float two();\n__global__ void k(float* x) { x[0] = two(); }\n"),
        (
            "two.cu",
            "#include <iostream>\n__device__ float two() { return 2; }\nvoid show() { std::cout << 2; }\n",
        ),
    ];
    let Some(found) = compile(&files, Options::default()) else { return };
    assert!(found.unwrap().ptx.contains(".entry _Z1kPf("));
}

#[test]
fn errors_of_device_code_name_what_was_left_out() {
    let source = "__global__ void k() { wrong(); }\nint main() { k<<<1, 32>>>(); }\n";
    let Some(found) = compile(&[("k.cu", source)], Options::default()) else { return };
    let error = found.unwrap_err();
    assert!(error.contains("k.cu(1): error: identifier \"wrong\" is undefined"), "{error}");
    assert!(error.contains("left out:") && error.contains("k.cu lines 2"), "{error}");
}

#[test]
fn headers_in_angle_brackets_and_the_standard_are_the_projects() {
    let file = "#include <part.cuh>\ntemplate <typename T> concept wide = sizeof(T) >= 4;\n\
        template <wide T> __device__ T thrice(T x) { return 3 * x; }\n\
        __global__ void k(float* x) { *x = twice(thrice(*x)); }\n";
    let options = Options { standard: Some("20".to_owned()), ..Options::default() };
    let Some(compiled) = compile(&[("a.cu", file), ("part.cuh", PART)], options) else { return };
    assert!(compiled.unwrap().ptx.contains(".entry"));
}
