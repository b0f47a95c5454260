//! The kernels that quantise a tensor, in the emulator: codes and factors are those of the CPU, bit for bit.

use driver::bytes_of;
use emu::{Emulator, Options, Schedule};
use flashcore::{DType, Element, Layout, Problem, Quantization, Quantized, Strides, quantize};
use half::{bf16, f16};
use kernels::{Arch, Operand, Program};
use problem::Tensor;
use ptx::Machine;

/// Draws of which some are large (xorshift64*).
fn draws(count: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        let x = bits as f32 / (1u32 << 23) as f32 - 1.0;
        if bits.is_multiple_of(61) { 100.0 * x } else { x }
    };
    std::iter::repeat_with(next).take(count)
}

/// The tensor's memory: draws in its rows, and NaN between the rows.
fn memory<T: Element>(problem: &Problem, tensor: Tensor, round: impl Fn(f32) -> T, seed: u64) -> Vec<T> {
    let (elements, origin) = problem.span(tensor).unwrap();
    let [batch, heads, rows, dim] = problem.extents(tensor);
    let mut data = vec![round(f32::NAN); elements];
    let mut values = draws(batch * heads * rows * dim, seed);
    for (b, h, s) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |s| (b, h, s))))
    {
        let start = (origin as i64 + problem.strides(tensor).offset(b, h, s)) as usize;
        for element in &mut data[start..start + dim] {
            *element = round(values.next().unwrap());
        }
    }
    data
}

fn stored<T: Element>(data: &[T]) -> Vec<u8> {
    match T::elements(data) {
        problem::Elements::F16(data) => bytes_of(data).to_vec(),
        problem::Elements::Bf16(data) => bytes_of(data).to_vec(),
        problem::Elements::F32(data) => bytes_of(data).to_vec(),
        problem::Elements::E4m3(data) => bytemuck::cast_slice(data).to_vec(),
        problem::Elements::E5m2(data) => bytemuck::cast_slice(data).to_vec(),
    }
}

/// Codes and factors that the emulator computes. Any finding is an error.
fn emulated(program: &Program, tensor: Tensor, data: &[u8], schedule: Schedule) -> (Vec<u8>, Vec<f32>) {
    let mut machine = Emulator::new(Options { schedule, ..Options::default() });
    let mut buffers: Vec<_> = Vec::new();
    for (operand, spec) in program.operands.iter().zip(&program.kernel.buffers) {
        let mut buffer = machine.allocate(spec.bytes).unwrap();
        if *operand == Operand::Tensor(tensor) {
            assert_eq!(spec.bytes, data.len());
            machine.upload(&mut buffer, data).unwrap();
        }
        buffers.push(buffer);
    }
    for kernel in program.steps() {
        let mut buffers: Vec<_> = buffers.iter_mut().collect();
        machine.launch(kernel, &mut buffers).unwrap_or_else(|error| panic!("{}: {error}", kernel.entry));
    }
    let mut read = |operand: Operand| {
        let at = program.operands.iter().position(|&o| o == operand).unwrap();
        let mut data = vec![0; program.kernel.buffers[at].bytes];
        machine.download(&buffers[at], &mut data).unwrap();
        data
    };
    let factors = read(Operand::Descale(tensor));
    let factors = factors.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    (read(Operand::Codes(tensor)), factors.collect())
}

/// Compares the kernels with the CPU. Returns the number of kernels.
fn agree<T: Element>(
    (problem, tensor): (&Problem, Tensor),
    data: &[T],
    options: &Quantization,
    arch: Arch,
) -> usize {
    let Quantized { codes, factors, layout } = quantize(problem, tensor, data, options).unwrap();
    assert_eq!(layout, options.layout(problem, tensor));
    let program = kernels::quantize::emit(problem, tensor, options, &arch).unwrap();
    let schedule = if codes.len().is_multiple_of(3) { Schedule::Random } else { Schedule::Late };
    let (found, of_kernel) = emulated(&program, tensor, &stored(data), schedule);
    let what = format!("{tensor:?} of {problem:?}, {options:?}");
    let bits = |factors: &[f32]| factors.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&of_kernel), bits(&factors), "factors of {what}");
    if let Some(at) = (0..codes.len()).find(|&i| codes[i] != found[i]) {
        panic!("code {at} is {:#x}, should be {:#x}: {what}", found[at], codes[at]);
    }
    assert_eq!(found.len(), codes.len());
    1 + program.then.len()
}

fn agree_in(problem: &Problem, tensor: Tensor, options: &Quantization, arch: Arch) -> usize {
    let seed = (problem.seq_kv + problem.head_dim) as u64;
    match problem.dtypes.of(tensor) {
        DType::F16 => agree((problem, tensor), &memory(problem, tensor, f16::from_f32, seed), options, arch),
        DType::Bf16 => {
            agree((problem, tensor), &memory(problem, tensor, bf16::from_f32, seed), options, arch)
        }
        _ => agree((problem, tensor), &memory(problem, tensor, |x| x, seed), options, arch),
    }
}

fn options(dtype: DType, rows: Option<u32>, hadamard: Option<u64>) -> Quantization {
    Quantization { rows, hadamard, ..Quantization::per_head(dtype) }
}

/// Head dims whose rows are one unit, a power of two of units, odd numbers of units, and the widest.
#[test]
fn every_head_dim_type_and_block_of_rows() {
    let types = [DType::F16, DType::Bf16, DType::F32];
    let blocks = [None, Some(64), Some(128)];
    for (case, dim) in [16, 32, 48, 64, 80, 96, 128, 192, 256, 272, 512, 576].into_iter().enumerate() {
        for (variant, rows) in blocks.into_iter().enumerate() {
            let dtype = types[(case + variant) % 3];
            let codes = [DType::E4m3, DType::E5m2][(case + variant) % 2];
            // The last block of rows is not full.
            let problem = Problem::new(1, 2, 150 - 7 * variant, dim, dtype).with_layout(Layout::Bshd);
            let tensor = [Tensor::Q, Tensor::K][variant % 2];
            let arch = [Arch::SM_89, Arch::SM_90, Arch::SM_120][variant];
            for hadamard in [None, Some(3 + case as u64)] {
                agree_in(&problem, tensor, &options(codes, rows, hadamard), arch);
            }
        }
    }
}

/// Few rows are read once; more rows of a factor than a CTA holds, and groups of heads, are read twice.
#[test]
fn long_sequences_and_groups_of_heads() {
    let steps = |heads: usize, heads_kv: usize, rows: usize, of_factor: Option<u32>| {
        let problem = Problem::new(2, heads, rows, 64, DType::F16).with_heads_kv(heads_kv, Layout::Bshd);
        agree_in(&problem, Tensor::Q, &options(DType::E4m3, of_factor, Some(1)), Arch::SM_90)
    };
    assert_eq!(steps(2, 2, 1, None), 1);
    assert_eq!(steps(2, 2, 256, None), 1);
    assert_eq!(steps(2, 2, 257, None), 2);
    assert_eq!(steps(1, 1, 600, Some(128)), 1);
    assert_eq!(steps(4, 2, 100, None), 2);
    assert_eq!(steps(6, 2, 150, Some(64)), 2);
    // More tiles than parts: a CTA has several.
    let problem = Problem::new(1, 1, 16_500, 256, DType::F16);
    assert_eq!(agree_in(&problem, Tensor::V, &options(DType::E5m2, None, None), Arch::SM_89), 2);
}

#[test]
fn strides_of_every_kind() {
    let mut problem = Problem::new(2, 3, 70, 64, DType::Bf16);
    problem.q = Strides { batch: 0, head: 8, row: 3 * 72 };
    problem.k = Strides { batch: 70 * 72 * 3 + 16, head: 70 * 72, row: -72 };
    problem.v = Strides { batch: 64, head: 128, row: 0 };
    for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
        for rows in [None, Some(64)] {
            agree_in(&problem, tensor, &options(DType::E4m3, rows, Some(9)), Arch::SM_89);
        }
    }
    let without_keys = Problem::new(1, 2, 3, 32, DType::F16).with_seq_kv(0, Layout::Bhsd);
    assert_eq!(agree_in(&without_keys, Tensor::K, &options(DType::E4m3, None, None), Arch::SM_90), 1);
}

/// NaN, infinities, numbers beyond and below the range, zeros of both signs: in one block, and in a block
/// that has nothing else.
#[test]
fn numbers_that_are_not_ordinary() {
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40, f32::MIN_POSITIVE, 3e38, -2e-20];
    let dim = 32;
    for hadamard in [None, Some(5)] {
        for (dtype, rows) in [(DType::E4m3, Some(64)), (DType::E5m2, None)] {
            let options = options(dtype, rows, hadamard);
            let problem = Problem::new(1, 2, 130, dim, DType::F32);
            for (i, &x) in special.iter().enumerate() {
                let mut data: Vec<f32> = draws(2 * 130 * dim, i as u64).collect();
                data[7] = x;
                data[64 * dim..128 * dim].fill(x);
                data[150 * dim + 3] = x;
                agree((&problem, Tensor::K), &data, &options, Arch::SM_90);
            }
            let tiny: Vec<f32> = draws(2 * 130 * dim, 5).map(|x| x * 1e-36).collect();
            agree((&problem, Tensor::K), &tiny, &options, Arch::SM_90);
            let half = problem.with_dtypes(DType::F16.into());
            let mut data: Vec<f16> = draws(2 * 130 * dim, 6).map(f16::from_f32).collect();
            (data[0], data[1], data[70 * dim]) = (f16::INFINITY, f16::NAN, f16::NEG_INFINITY);
            agree((&half, Tensor::K), &data, &options, Arch::SM_89);
        }
    }
}
