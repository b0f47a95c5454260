//! Tests `check` on sources and launches as users have them: options in place of a launch file, `.cu` files
//! with host code, references. Without NVRTC or NumPy the messages say what is missing.

use std::process::Output;

use crate::folder::{Folder, text};

const PTX: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry _Z5twicePKfPfi(.param .u64 x, .param .u64 y, .param .u32 n)
{
    .reg .b64 %rd<6>;
    .reg .b32 %r<6>;
    .reg .f32 %f<2>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r5, [n];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.u32 %r4, %r2, %r3, %r1;
    setp.ge.u32 %p1, %r4, %r5;
    @%p1 ret;
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f1, %f1, %f1;
    st.global.f32 [%rd5], %f1;
    ret;
}
";

/// Asserts the exit code and words of the output. If NVRTC is missing, asserts that the output says so.
fn assert_told(output: &Output, code: i32, words: &[&str]) {
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    if error.contains("FLASHCORE_NVRTC") {
        return filetest::not_run("NVRTC is missing");
    }
    assert_eq!(output.status.code(), Some(code), "{out}{error}");
    for word in words {
        assert!(out.contains(word) || error.contains(word), "{word}: {out}{error}");
    }
}

#[test]
fn a_launch_can_be_stated_by_options() {
    let folder = Folder::new("stated");
    let ptx = folder.write("twice.ptx", PTX);
    let run = |args: &[&str]| folder.run(&[&["check", &ptx], args].concat());
    let base = ["--grid", "4", "--block", "32,1", "--arg", "x:f32:100=random", "--arg"];
    let passed = run(&[&base[..], &["y:f32:100", "--arg", "n:i32=100"]].concat());
    assert_told(&passed, 0, &["passed after 3 runs", "output not judged"]);
    let short = run(&[&base[..], &["y:f32:64", "--arg", "n:i32=100", "--entry", "twice"]].concat());
    assert_told(&short, 1, &["out_of_bounds", "y["]);
    for (args, said) in [
        (&["--grid", "4"][..], "flashcore: 0 --arg given, but entry twice takes 3 parameters"),
        (&["--grid", "4", "--block", "32"], "0 --arg given, but entry"),
        (&["--grid", "x"], "invalid value 'x' for --grid"),
        (&["--grid", "0", "--block", "32"], "invalid value '0' for --grid: expected one to three numbers"),
        (&["--grid", "1", "--block", "-1"], "invalid value '-1' for --block: expected one to three numbers"),
        (
            &["--grid", "1", "--entry", "once"],
            "invalid value 'once' for --entry: expected an entry of the module: twice",
        ),
        (
            &["--grid", "1", "--arg", "n:i32=1.5"],
            "invalid value '1.5' for --arg n:i32=1.5 value: expected a whole number from -2^31",
        ),
        (
            &["--grid", "1", "--num-warps", "3"],
            "invalid value '3' for --num-warps: expected a power of two up to 32",
        ),
        (&["--grid", "4", "--launch", "a.toml"], "cannot be used with"),
        (&["--block", "32"], "--grid"),
        (&[], "missing --launch: state the launch in a file, or by --grid"),
        (&["--suggest", "--json"], "invalid value '--json' for check --suggest"),
    ] {
        assert_told(&run(args), 3, &[said]);
    }
    let wrong = run(&[&base[..], &["y:f33:100"]].concat());
    assert_told(&wrong, 3, &["invalid value 'y:f33:100' for --arg: expected a type of elements"]);
}

/// A kernel whose CTAs all store their number to `y`.
fn racy(comment: &str) -> String {
    PTX.replace("mad.lo.u32 %r4, %r2, %r3, %r1;", "mov.u32 %r4, %r1;")
        .replace("add.f32 %f1, %f1, %f1;", "cvt.rn.f32.u32 %f1, %r2;")
        .replace("[%rd5], %f1;", &format!("[%rd5], %f1; {comment}"))
}

const RACY: [&str; 10] =
    ["--grid", "4", "--block", "32", "--arg", "x:f32:32=random", "--arg", "y:f32:32", "--arg", "n:i32=99"];

/// A comment in the file of the line allows the race.
#[test]
fn comments_allow_findings() {
    let folder = Folder::new("allowed");
    let check = |comment: &str| {
        let ptx = folder.write("twice.ptx", &racy(comment));
        folder.run(&[&["check", &ptx], &RACY[..]].concat())
    };
    assert_told(&check(""), 1, &["1. race at line 26"]);
    let allowed = check("// flashcore: allow race because any result will do");
    assert_told(&allowed, 0, &["note: race at line 26", "PTX:26 allows it because any result will do"]);
    assert_told(
        &check("// flashcore: allow race"),
        3,
        &["flashcore: PTX:26: invalid comment `flashcore: allow race`: "],
    );
}

/// Beside an earlier version, only what it does not have fails: its findings are notes, and its outputs
/// judge.
#[test]
fn a_kernel_is_checked_against_an_earlier_version() {
    let folder = Folder::new("against");
    let right = [
        "--grid",
        "2",
        "--block",
        "32",
        "--arg",
        "x:f32:64=random",
        "--arg",
        "y:f32:64",
        "--arg",
        "n:i32=64",
    ];
    let check = |new: &str, old: &str, launch: &[&str], more: &[&str]| {
        let files = [folder.write("new.ptx", new), folder.write("old.ptx", old)];
        folder.run(&[&["check", &files[0], "--against", &files[1]], launch, more].concat())
    };
    let other_order = PTX.replace("add.f32 %f1, %f1, %f1;", "fma.rn.f32 %f1, %f1, 0f3F800000, %f1;");
    let judged =
        ["judged by the kernel in ", "old.ptx: passed; its outputs judge", "y: 0 of 64 elements wrong"];
    assert_told(&check(&other_order, PTX, &right, &[]), 0, &judged);
    let wrong = PTX.replace("add.f32 %f1, %f1, %f1;", "fma.rn.f32 %f1, %f1, %f1, %f1;");
    assert_told(&check(&wrong, PTX, &right, &[]), 1, &["wrong answer in y", "old.ptx says"]);
    // Findings of the earlier version are notes, new ones fail, and those that are gone are named.
    let known = ["note: race at line 26", "old.ptx has it", "old.ptx: failed; its findings are notes"];
    assert_told(&check(&racy(""), &racy(""), &RACY, &[]), 0, &known);
    let beyond = racy("").replace("st.global.f32 [%rd5]", "st.global.f32 [%rd5+64]");
    assert_told(&check(&beyond, &racy(""), &RACY, &[]), 1, &["out_of_bounds at line 26"]);
    let mended = check(PTX, &racy(""), &RACY, &["--json"]);
    let found: serde_json::Value = serde_json::from_str(&text(&mended.stdout)).unwrap();
    assert_eq!(found["against"]["verdict"], "failed");
    assert!(found["against"]["mended"][0].as_str().unwrap().starts_with("race at line 26"), "{found:#}");
    let other =
        PTX.replace(".param .u32 n)", ".param .u64 n)").replace("ld.param.u32 %r5, [n]", "mov.u32 %r5, 64");
    assert_told(&check(PTX, &other, &right, &[]), 3, &["n"]);
    assert_told(&check(PTX, PTX, &right, &["--suggest"]), 3, &["--suggest"]);
    assert_told(
        &folder.run(&[&["check", "new.ptx", "--against", "-"][..], &right].concat()),
        3,
        &["invalid value '-' for --against: expected files"],
    );
}

/// Findings that an earlier check wrote do not fail, wherever their lines are now; others do.
#[test]
fn only_new_findings_fail_beside_a_baseline() {
    let folder = Folder::new("baseline");
    let ptx = folder.write("twice.ptx", &racy(""));
    let check = |more: &[&str]| folder.run(&[&["check", &ptx], &RACY[..], more].concat());
    assert_told(&check(&["--sarif", "known.sarif"]), 1, &["1. race at line 26"]);
    let with = ["--baseline", "known.sarif"];
    assert_told(&check(&with), 0, &["note: race at line 26", "; the baseline has it"]);
    folder.write(
        "twice.ptx",
        &racy("").replace("cvta.to.global.u64 %rd1", "// moved\ncvta.to.global.u64 %rd1"),
    );
    assert_told(&check(&with), 0, &["note: race at line 27"]);
    folder.write("twice.ptx", &racy("").replace("st.global.f32 [%rd5]", "st.global.f32 [%rd5+64]"));
    assert_told(&check(&with), 1, &["out_of_bounds at line 26", "race at line 26"]);
    assert_told(&check(&["--baseline", "none.sarif"]), 3, &["none.sarif"]);
    let other = ["--baseline", "twice.ptx"];
    assert_told(
        &check(&other),
        3,
        &["invalid value 'twice.ptx' for --baseline: expected a file that --sarif wrote"],
    );
    let same = ["--baseline", "known.sarif", "--sarif", "known.sarif"];
    assert_told(&check(&same), 3, &["is the same file as --baseline"]);
}

/// An extension of PyTorch whose headers are not installed, and host code that calls Thrust.
const EXTENSION: &str = "#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <thrust/device_ptr.h>
#include <thrust/scan.h>

__global__ void narrow(const float* x, __half* y, uint32_t n) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2half(fminf(x[i], FLT_MAX));
}

void offsets(int* counts, int n) {
    thrust::exclusive_scan(thrust::device_ptr<int>(counts), thrust::device_ptr<int>(counts) + n, counts);
}

torch::Tensor run(torch::Tensor x) {
    auto y = torch::empty_like(x, x.options().dtype(at::kHalf));
    narrow<<<4, 32, 0, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), (__half*)y.data_ptr(), x.numel());
    return y;
}
";

#[test]
fn extensions_of_pytorch_need_no_headers() {
    let folder = Folder::new("extension");
    let file = folder.write("narrow.cu", EXTENSION);
    let args = [
        "--grid",
        "4",
        "--block",
        "32",
        "--arg",
        "x:f32:100=random",
        "--arg",
        "y:f16:100",
        "--arg",
        "n:u32=100",
    ];
    assert_told(&folder.run(&[&["check", &file], &args[..]].concat()), 0, &["passed after 3 runs"]);
}

#[test]
fn a_suggestion_can_be_edited_and_checked() {
    let folder = Folder::new("suggest");
    let ptx = folder.write("twice.ptx", PTX);
    let suggested = folder.run(&["check", &ptx, "--suggest"]);
    assert_eq!(suggested.status.code(), Some(0), "{}", text(&suggested.stderr));
    let launch = folder.write("twice.toml", &text(&suggested.stdout));
    assert_told(&folder.run(&["check", &ptx, "--launch", &launch]), 0, &["passed after 3 runs"]);
}

/// The suggested sizes give threads of several CTAs work, so that the first file finds a race between CTAs.
#[test]
fn a_suggestion_uses_the_whole_launch() {
    let folder = Folder::new("sizes");
    let ptx = folder.write("racy.ptx", &racy(""));
    let suggested = text(&folder.run(&["check", &ptx, "--suggest"]).stdout);
    assert!(
        suggested.contains("sizes: 248, so that the last of 2 CTAs of 128 threads along x has a rest"),
        "{suggested}"
    );
    let launch = folder.write("racy.toml", &suggested);
    assert_told(&folder.run(&["check", &ptx, "--launch", &launch]), 1, &["race", "CTA"]);
}

/// A launch of 100 numbers, of which `y` is a copy within 0.001.
const COPIED: &str = r#"arg = [
    { name = "x", role = "buffer", dtype = "f32", elements = 100, init = "iota" },
    { name = "y", role = "buffer", dtype = "f32", elements = 100, init = "uninitialised" },
    { role = "i32", value = 100 },
]
[launch]
grid = [2]
block = [64]
"#;

/// A mutant whose results stay within the tolerance of `[reference]` is reported as such. Without a
/// reference, the report says that one would find it.
#[test]
fn mutants_are_told_with_what_judged_them() {
    let folder = Folder::new("mutants");
    let ptx =
        folder.write("copy.ptx", &PTX.replace("add.f32 %f1, %f1, %f1;", "mul.f32 %f1, %f1, 0f3F800001;"));
    let reference = "[reference]\noutput = \"y\"\nbuiltin = \"scan\"\noperation = \"max\"\ninputs = [\"x\"]\natol = 1e-3\n";
    let judged = folder.write("judged.toml", &format!("{COPIED}{reference}"));
    let unjudged = folder.write("unjudged.toml", COPIED);
    let run =
        |launch: &str| text(&folder.run(&["check", &ptx, "--launch", launch, "--mutants", "20"]).stdout);
    let said = run(&judged);
    for words in [
        "mutant skip rescale at line 25: within the tolerance: no hazard, ",
        "bytes of y differ from the original's, by less than the reference allows",
        "mutants: 3 found, 1 within the tolerance\n",
        "y: 0 of 100 elements wrong; worst error",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains("a [reference] would find"), "{said}");
    let said = run(&unjudged);
    assert!(said.contains("differ from the original's: a [reference] would find it"), "{said}");
    assert!(said.contains("only a [reference] would find") && !said.contains("tolerance"), "{said}");
}

/// `-q` leaves out what costs time, and so does a check that failed.
#[test]
fn costs_are_for_checks_that_pass_and_are_not_quiet() {
    let folder = Folder::new("quiet");
    let costs = |contents: &str, args: &[&str]| {
        let ptx = folder.write("k.ptx", contents);
        let launch = ["--grid", "2", "--block", "32", "--arg", "x:f32:64=random", "--arg", "y:f32:64"];
        let output =
            folder.run(&[args, &["check", &ptx, "--diagnose"], &launch[..], &["--arg", "n:i32=64"]].concat());
        (output.status.code(), text(&output.stdout).contains("what costs time"))
    };
    assert_eq!(costs(PTX, &[]), (Some(0), true));
    assert_eq!(costs(PTX, &["--quiet"]), (Some(0), false));
    assert_eq!(costs(&racy(""), &[]), (Some(1), false));
}

/// A NumPy function is the reference: a correct, a wrong, a failing and an endless one.
#[test]
fn a_python_function_judges() {
    let folder = Folder::new("python");
    let ptx = folder.write("twice.ptx", PTX);
    folder.write(
        "ref.py",
        "import time\ndef twice(x, n):\n    return x[:n] * 2\ndef thrice(x, n):\n    return x * 3\n\
         def fails(x, n):\n    raise ValueError('no such row')\ndef endless(x, n):\n    time.sleep(60)\n\
         def other(x, n):\n    return x[:5]\n",
    );
    let check = |function: &str, more: &str| {
        let launch = format!(
            "[launch]\ngrid = [4]\nblock = [32]\n[[arg]]\nname = \"x\"\nrole = \"buffer\"\ndtype = \"f32\"\nshape = [100]\n\
             init = \"random\"\n[[arg]]\nname = \"y\"\nrole = \"buffer\"\ndtype = \"f32\"\nshape = [100]\n[[arg]]\nrole = \"i32\"\n\
             value = 100\n[reference]\npython = \"ref.py:{function}\"\n{more}"
        );
        let launch = folder.write("launch.toml", &launch);
        folder.run(&["check", &ptx, "--launch", &launch])
    };
    if text(&check("twice", "").stderr).contains("NumPy is missing") {
        return filetest::not_run("NumPy is missing");
    }
    assert_told(&check("twice", ""), 0, &["y judged by the Python function ref.py:twice"]);
    assert_told(&check("thrice", ""), 1, &["wrong answer in y", "the Python function ref.py:thrice says"]);
    assert_told(&check("fails", ""), 3, &["ValueError: no such row"]);
    assert_told(&check("endless", "timeout = 0.5\n"), 3, &["it did not end within 0.5 s"]);
    assert_told(&check("other", ""), 3, &["it returned an array of shape [5], expected [100]"]);
    assert_told(&check("nothing", ""), 3, &["has no function nothing"]);
}

const CUDA: &str = r#"#include <stdio.h>
#include <cstdint>
#include <vector>
#include <algorithm>
#include <cassert>
#include <cuda_runtime.h>
#include "part.cuh"

#define CHECK(call) do { cudaError_t error = (call); if (error != cudaSuccess) { fprintf(stderr, "%s\n", cudaGetErrorString(error)); exit(1); } } while (0)

__constant__ float factors[4];

struct Timer { cudaEvent_t start; Timer() { cudaEventCreate(&start); } };

template <typename T, int N>
__global__ void __launch_bounds__(N) scale(const T* x, T* y, uint32_t n) {
    uint32_t i = blockIdx.x * N + threadIdx.x;
    assert(n > 0);
    if (i < n) y[i] = twice(x[i]) * T(FACTOR) + T(std::max(0.0f, factors[i % 4]));
}

static float* filled(std::vector<float>& host) {
    for (auto& x : host) x = rand() / 2.0f;
    return host.data();
}

template <typename T> void run(T* x, T* y, int n) {
    scale<T, 32><<<(n + 31) / 32, 32>>>(x, y, n);
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char** argv) {
    std::vector<float> host(100);
    Timer timer;
    float *x, *y;
    CHECK(cudaMalloc(&x, 400));
    CHECK(cudaMalloc(&y, 400));
    CHECK(cudaMemcpy(x, filled(host), 400, cudaMemcpyHostToDevice));
    run<float>(x, y, 100);
    scale<float, 32><<<4, 32>>>(x, y, 100);
    printf("done\n");
    return 0;
}
"#;

const LAUNCH: &str = "[launch]\nentry = \"scale<float, 32>\"\ngrid = [4]\n[[arg]]\nname = \"x\"\nrole = \"buffer\"\n\
    dtype = \"f32\"\nshape = [100]\ninit = 2\n[[arg]]\nname = \"y\"\nrole = \"buffer\"\ndtype = \"f32\"\nshape = [100]\n\
    [[arg]]\nrole = \"u32\"\nvalue = 100\n[[constant]]\nname = \"factors\"\ndtype = \"f32\"\nvalues = [0.0, 0.0, 0.0, 0.0]\n\
    [reference]\noutput = \"y\"\nkernel = \"plain.cu\"\nblock = [32]\n";

const PLAIN: &str = "extern \"C\" __global__ void plain(const float* x, float* y, unsigned n) {\n\
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n if (i < n) y[i] = 6 * x[i];\n}\n\
    int main() { plain<<<1, 32>>>(0, 0, 0); }\n";

#[test]
fn cuda_files_may_have_host_code_templates_and_headers_of_their_own() {
    let folder = Folder::new("host-code");
    let cuda = folder.write("scale.cu", CUDA);
    folder.write("plain.cu", PLAIN);
    std::fs::create_dir(folder.0.join("include")).unwrap();
    folder.write(
        "include/part.cuh",
        "#pragma once\ntemplate <typename T> __device__ T twice(T x) { return x + x; }\n",
    );
    let launch = folder.write("scale.toml", LAUNCH);
    let options = ["-I", "include", "-DFACTOR=3", "--instantiate", "scale<float, 32>", "--block", "32"];
    let check = |options: &[&str]| folder.run(&[&["check", &cuda, "--launch", &launch], options].concat());
    let block = folder.write("scale.toml", &LAUNCH.replace("grid = [4]", "grid = [4]\nblock = [32]"));
    assert_eq!(block, launch);
    assert_told(&check(&options[..5]), 0, &["passed after 3 runs", "y judged by the kernel in plain.cu"]);
    let wrong = ["-I", "include", "-D", "FACTOR=4", "--instantiate", "scale<float, 32>"];
    assert_told(&check(&wrong), 1, &["wrong answer in y", "the kernel in plain.cu says"]);
    let none = check(&["-I", "include", "-DFACTOR=3"]);
    assert_told(&none, 3, &["all kernels are templates (scale)", "--instantiate 'scale<float, 32>'"]);
    let lost = check(&["-DFACTOR=3", "--instantiate", "scale<float, 32>"]);
    assert_told(&lost, 3, &["part.cuh"]);
}

#[test]
fn faults_of_device_code_are_told_with_what_was_left_out() {
    let folder = Folder::new("device-fault");
    let launch = folder.write("launch.toml", "[launch]\ngrid = [1]\nblock = [32]\n");
    let source = "#include <iostream>\n__global__ void k() { wrong(); }\nint main() { k<<<1, 32>>>(); }\n";
    let cuda = folder.write("k.cu", source);
    let output = folder.run(&["check", &cuda, "--launch", &launch]);
    assert_told(
        &output,
        3,
        &["k.cu(2): error: identifier \"wrong\" is undefined", "left out: ", "k.cu lines 3"],
    );
}

#[test]
fn several_files_are_compiled_together() {
    let folder = Folder::new("several");
    let launch = folder.write(
        "launch.toml",
        "[launch]\ngrid = [1]\nblock = [32]\n[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nelements = 32\n",
    );
    folder.write(
        "two.cu",
        "#include <iostream>\n__device__ float two() { return 2; }\nvoid show() { std::cout << two(); }\n",
    );
    let cuda = folder.write(
        "one.cu",
        "__device__ float two();\n__global__ void k(float* x) { x[threadIdx.x] = two(); }\nint main() { k<<<1, 32>>>(0); }\n",
    );
    let output = folder.run(&["check", &cuda, "--with", "two.cu", "--launch", &launch]);
    assert_told(&output, 0, &["passed after 3 runs"]);
}

/// The book's page on other kernels: its file is checked as it stands.
#[test]
fn the_guide_s_softmax_passes_and_is_judged() {
    let page = std::fs::read_to_string("../../docs/src/guide/check.md").unwrap();
    let (_, page) = page.split_once("## A kernel that is not attention").unwrap();
    let block =
        |language: &str| page.split_once(&format!("```{language}\n")).unwrap().1.split_once("```").unwrap().0;
    let folder = Folder::new("guide");
    let (cuda, launch) = (folder.write("soft.cu", block("cpp")), folder.write("soft.toml", block("toml")));
    let judged = folder.run(&["check", &cuda, "--launch", &launch]);
    assert_told(
        &judged,
        0,
        &["passed after 3 runs", "y judged by the built-in softmax", "y: 0 of 400 elements wrong"],
    );
    let command = page.lines().find(|line| line.contains("--grid 4")).unwrap();
    let args: Vec<&str> = command.split_whitespace().skip(1).collect();
    assert_told(&folder.run(&args), 0, &["passed after 3 runs", "output not judged"]);
}

const TEXTURE: &str = "
.visible .entry _Z7sampledyPf(.param .u64 t, .param .u64 y)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    .reg .f32 %f<5>;
    ld.param.u64 %rd1, [t];
    mov.u32 %r1, %tid.x;
    tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd1, {%r1}];
    ret;
}
";

/// An instruction that the emulator does not support matters only to a launch that executes it.
#[test]
fn an_unknown_instruction_is_incomplete_where_it_is_reached() {
    let folder = Folder::new("texture");
    let ptx = folder.write("both.ptx", &format!("{PTX}{TEXTURE}"));
    let run = |args: &[&str]| folder.run(&[&["check", &ptx, "--grid", "1", "--block", "32"], args].concat());
    let twice = ["--entry", "twice", "--arg", "x:f32:32=1", "--arg", "y:f32:32", "--arg", "n:i32=32"];
    assert_told(&run(&twice), 0, &["passed after 3 runs"]);
    let sampled = ["--entry", "sampled", "--arg", "t:u64=1", "--arg", "y:f32:32"];
    assert_told(&run(&sampled), 2, &["incomplete: sampled of", "unknown instruction `tex.1d.v4.f32.s32`"]);
    // Both reports say so.
    let reports = ["--sarif", "a.sarif", "--junit", "a.xml"];
    assert_told(&run(&[&sampled[..], &reports].concat()), 2, &["incomplete: sampled of"]);
    let read = |name: &str| std::fs::read_to_string(folder.0.join(name)).unwrap();
    let log: serde_json::Value = serde_json::from_str(&read("a.sarif")).unwrap();
    let result = &log["runs"][0]["results"][0];
    assert_eq!((&result["ruleId"], &result["ruleIndex"]), (&"incomplete".into(), &0.into()));
    let line = 1 + std::fs::read_to_string(&ptx).unwrap().lines().position(|l| l.contains("tex.1d")).unwrap();
    assert_eq!(result["locations"][0]["physicalLocation"]["region"]["startLine"], line);
    assert_eq!(result["locations"][0]["logicalLocations"][0]["name"], "sampled");
    assert!(read("a.xml").contains("errors=\"1\"") && read("a.xml").contains("type=\"incomplete\""));
}

const TRITON: &str = "import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < n), at < n)
";

/// Without Triton the message says how to install it.
#[test]
fn a_triton_kernel_is_compiled_for_its_arguments() {
    let folder = Folder::new("triton");
    let file = folder.write("scale.py", TRITON) + ":scale";
    let run = |n: &str, more: &[&str]| {
        let args = ["--grid", "4", "--arg", "x:f32:100=random", "--arg", "y:f32:100", "--arg", n];
        folder.run(&[&["check", &file], &args[..], more].concat())
    };
    let passed = run("n:i32=100", &["--constexpr", "BLOCK=32"]);
    if text(&passed.stderr).contains("pip install triton") {
        assert_eq!(passed.status.code(), Some(3));
        return filetest::not_run("Triton is missing");
    }
    assert_told(&passed, 0, &["passed after 3 runs"]);
    assert_told(&run("n:i32=128", &["--constexpr", "BLOCK=32"]), 1, &["out_of_bounds at scale.py:8"]);
    assert_told(&run("n:i32=100", &[]), 3, &["missing --constexpr for BLOCK"]);
    assert_told(&run("n:i32=100", &["--constexpr", "SIZE=3"]), 3, &["the kernel has x, y, n, BLOCK"]);
    // `--suggest` writes the constants into the launch file, and the command line replaces them.
    let written = folder.run(&["check", &file, "--suggest"]);
    let launch = folder.write("scale.toml", &text(&written.stdout));
    let by_file = |more: &[&str]| folder.run(&[&["check", &file, "--launch", &launch], more].concat());
    assert_told(&by_file(&[]), 0, &["passed after 3 runs"]);
    assert_told(&by_file(&["--constexpr", "BLOCK=48"]), 3, &["power of 2"]);
    // A tutorial asks for the GPU's device, and launches its kernel when it is imported.
    let driver = "\nDEVICE = triton.runtime.driver.active.get_active_torch_device()\n\n\n@triton.jit";
    let tutorial = TRITON.replacen("\n@triton.jit", driver, 1) + "\n\nscale[(4,)](x, y, 100, BLOCK=32)\n";
    folder.write("scale.py", &tutorial);
    assert_told(&run("n:i32=100", &["--constexpr", "BLOCK=32"]), 0, &["passed after 3 runs"]);
}
