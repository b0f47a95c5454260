//! Kernels that quantise: what is refused, what the code depends on, machine code, and the barrier.
//!
//! `crates/flashcore/tests/quantize.rs` compares codes and factors with those of the CPU.

use emu::{Emulator, Options};
use flashcore_kernels::{Arch, KernelError, PlanError, Program, ProgramBuffer, quantize};
use problem::{DType, Layout, Operand, Problem, ProblemError, Quantization, Tensor};
use ptx::{Kernel, Machine};

use crate::common::fp8::{edit_text, lines};
use crate::tools::{self, Facts};

const PLAIN: Quantization = Quantization::per_head(DType::E4m3);

fn emit(problem: &Problem, tensor: Tensor, options: &Quantization, arch: &Arch) -> Program {
    quantize::emit(problem, tensor, options, arch).unwrap_or_else(|error| panic!("{problem:?}: {error}"))
}

#[test]
fn what_the_kernels_do_not_support_is_refused() {
    let problem = Problem::new(2, 4, 100, 64, DType::F16).with_heads_kv(2, Layout::Bshd);
    let refused = |problem: &Problem, options: &Quantization, arch: &Arch| {
        quantize::emit(problem, Tensor::K, options, arch).unwrap_err()
    };
    let message = |problem: &Problem, options: &Quantization, arch: &Arch| {
        let error = refused(problem, options, arch);
        assert!(matches!(error, KernelError::Plan(_)), "{error}");
        assert_eq!(quantize::bind(problem, Tensor::K, options, arch), Err(error.clone()));
        error.to_string()
    };
    assert_eq!(
        message(&problem, &PLAIN, &Arch::SM_86),
        "invalid value '86' for sm: expected 89 and later, which round to 8-bit floats"
    );
    let odd = Problem::new(1, 1, 100, 72, DType::F16);
    assert!(
        message(&odd, &PLAIN, &Arch::SM_90).starts_with("invalid value '72' for head_dim: expected mult")
    );
    let wide = Problem::new(1, 1, 100, 592, DType::F16);
    assert!(message(&wide, &PLAIN, &Arch::SM_90).starts_with("invalid value '592' for head_dim"));
    let mut shifted = problem.clone();
    shifted.k.row += 4;
    assert_eq!(
        message(&shifted, &PLAIN, &Arch::SM_90),
        "invalid value '132' for the row stride of k with family quantize: expected a multiple of 8 elements, \
         as the kernels load 16 bytes at once"
    );
    let eight = problem.clone().with_dtypes(DType::E4m3.into());
    let error = refused(&eight, &PLAIN, &Arch::SM_90);
    assert!(matches!(error, KernelError::Plan(PlanError::DType { .. })), "{error}");
    let many = Problem::new(70_000, 40_000, 1, 16, DType::F16);
    assert!(message(&many, &PLAIN, &Arch::SM_90).starts_with(
        "invalid value '2800000000' for CTAs (parts of the rows · heads_kv · batch): expected fewer than 2^31"
    ));
    let wrong = Quantization { rows: Some(32), ..PLAIN };
    let expected = ProblemError::Quantization {
        option: "rows",
        value: "32".to_owned(),
        accepted: "64, 128, or one factor per KV head",
    };
    assert_eq!(refused(&problem, &wrong, &Arch::SM_90), KernelError::Problem(expected));
    let smooth = Quantization { smooth_keys: true, ..PLAIN };
    let expected = ProblemError::Quantization {
        option: "smooth_keys",
        value: "true".to_owned(),
        accepted: "false with a softcap, sinks, a score program or an LSE, which see the mean",
    };
    assert_eq!(refused(&problem.with_softcap(5.0), &smooth, &Arch::SM_90), KernelError::Problem(expected));
}

/// Lengths, batches, strides, groups and seeds are launch parameters.
#[test]
fn equal_codes_are_equal_texts() {
    let base = Problem::new(1, 4, 1000, 128, DType::Bf16);
    let rotated = Quantization { hadamard: Some(1), ..PLAIN };
    let of = |problem: &Problem, options: &Quantization| {
        let (code, contracts) = quantize::bind(problem, Tensor::Q, options, &Arch::SM_90).unwrap();
        let program = emit(problem, Tensor::Q, options, &Arch::SM_90);
        assert_eq!(program.contracts, contracts);
        (code, program.module.to_string())
    };
    let first = of(&base, &rotated);
    let mut strided = base.clone().with_layout(Layout::Bshd);
    strided.q.batch = 1 << 30;
    for other in [
        of(
            &Problem { batch: 3, seq_q: 2001, seq_kv: 17, ..base.clone() }.with_layout(Layout::Bhsd),
            &rotated,
        ),
        of(&strided, &rotated),
        of(&base, &Quantization { hadamard: Some(2), ..rotated }),
        of(&Problem { heads_q: 9, heads_kv: 9, ..base.clone() }.with_layout(Layout::Bhsd), &rotated),
    ] {
        assert!(other == first);
    }
    let grouped = base.clone().with_heads_kv(2, Layout::Bhsd);
    for other in [
        of(&base, &PLAIN),
        of(&base, &Quantization { rows: Some(64), ..rotated }),
        of(&base, &Quantization { dtype: DType::E5m2, ..rotated }),
        of(&grouped, &rotated),
        of(&base.clone().with_dtypes(DType::F16.into()), &rotated),
        of(&Problem::new(1, 4, 1000, 64, DType::Bf16), &rotated),
    ] {
        assert!(other.0 != first.0 && other.1 != first.1);
    }
    // Only K is smoothed.
    let smooth = Quantization { smooth_keys: true, ..rotated };
    assert!(of(&base, &smooth) == first);
    let of_keys = |problem: &Problem| {
        let (code, contracts) = quantize::bind(problem, Tensor::K, &smooth, &Arch::SM_90).unwrap();
        let program = emit(problem, Tensor::K, &smooth, &Arch::SM_90);
        assert_eq!(program.contracts, contracts);
        (code, program.module.to_string())
    };
    let longer = Problem { batch: 2, seq_kv: 30_000, ..base.clone() }.with_layout(Layout::Bhsd);
    assert!(of_keys(&base) == of_keys(&longer) && of_keys(&base).0 != first.0);
}

/// With 512 threads on an SM, two of the largest CTAs, a thread has 128 registers.
const REGISTERS: u32 = 128;

#[test]
fn kernels_assemble_without_spills() {
    let (mut cases, mut programs) = (Vec::new(), Vec::new());
    for dim in [64, 128, 192, 256] {
        for (dtype, rows) in [DType::F16, DType::F32].iter().flat_map(|&t| [(t, Some(64)), (t, None)]) {
            let problem = Problem::new(1, 8, 4096, dim, dtype);
            let grouped = problem.clone().with_heads_kv(2, Layout::Bhsd);
            for (hadamard, smooth_keys) in [None, Some(1)].iter().flat_map(|&h| [(h, false), (h, true)]) {
                for (problem, tensor, arch) in [
                    (&problem, Tensor::K, Arch::SM_89),
                    (&problem, Tensor::K, Arch::SM_90),
                    (&problem, Tensor::K, Arch::SM_120),
                    (&grouped, Tensor::Q, Arch::SM_90),
                    (&grouped, Tensor::Q, Arch::SM_120),
                ] {
                    let options = Quantization { rows, hadamard, smooth_keys, ..PLAIN };
                    cases.push(format!("{tensor:?} {dim} {dtype} {options:?} sm_{}", arch.sm));
                    programs.push(emit(problem, tensor, &options, &arch));
                }
            }
        }
    }
    let kernels: Vec<Kernel> = programs.iter().map(|program| program.kernel(0)).collect();
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (what, Facts { registers, spills, .. }) in cases.into_iter().zip(facts) {
        assert_eq!(spills, 0, "{what}");
        assert!(registers <= REGISTERS, "{what}: {registers}");
    }
}

/// Every load and store of a tensor moves 16 bytes.
#[test]
fn rows_move_in_16_bytes() {
    for dtype in [DType::F16, DType::F32] {
        for rows in [Some(64), None] {
            let options = Quantization { rows, hadamard: Some(1), ..PLAIN };
            let problem = Problem::new(1, 8, 4096, 128, dtype);
            let text = emit(&problem, Tensor::Q, &options, &Arch::SM_90).module.to_string();
            let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
            let kernels = if rows.is_some() { 1 } else { 2 };
            // A thread has four units.
            let units = 4;
            assert_eq!(count("ld.global.v4.b32"), kernels * units * dtype.bytes(), "{text}");
            assert_eq!(count("st.global.v4.b32"), units);
            // One factor, and that of a tensor without rows or the largest magnitude of a part.
            assert_eq!(count("st.global.f32") + count("st.global.b32"), 2);
            assert_eq!(count("ld.global.b32"), kernels - 1);
        }
    }
}

/// Without the barrier, a thread may read the magnitude of a warp, or the sums of a strand, before another
/// warp has stored them. The barriers of a cluster are needed, too.
#[test]
fn the_barrier_is_needed() {
    for (tensor, rows, smooth_keys) in [
        (Tensor::K, Some(64), false),
        (Tensor::K, None, false),
        (Tensor::K, None, true),
        (Tensor::Q, Some(64), false),
    ] {
        let options = Quantization { rows, smooth_keys, ..PLAIN };
        let problem = Problem::new(1, 2, 300, 64, DType::F16).with_heads_kv(1, Layout::Bshd);
        let run = |program: &Program| -> Result<(), String> {
            let mut machine = Emulator::new(Options::default());
            let mut buffers: Vec<_> = Vec::new();
            for &ProgramBuffer { kind, bytes } in &program.contracts.buffers {
                let mut buffer = machine.allocate(bytes).map_err(|error| error.to_string())?;
                if kind == Operand::Tensor(tensor).into() {
                    machine.upload(&mut buffer, &vec![0x2C; bytes]).map_err(|error| error.to_string())?;
                }
                buffers.push(buffer);
            }
            for kernel in program.kernels() {
                let mut buffers: Vec<_> = buffers.iter_mut().collect();
                machine.launch(&kernel, &mut buffers).map_err(|error| error.to_string())?;
            }
            Ok(())
        };
        let mut program = emit(&problem, tensor, &options, &Arch::SM_90);
        assert_eq!(run(&program), Ok(()));
        let is_barrier =
            |line: &str| ["bar.sync", "barrier.cluster"].iter().any(|b| line.trim_start().starts_with(b));
        edit_text(&mut program, |text| lines(text, |line, _| (!is_barrier(line)).then(|| line.to_owned())));
        let finding = run(&program).unwrap_err();
        assert!(finding.contains("race"), "{finding}");
    }
}
