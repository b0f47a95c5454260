//! The kernels that quantise a tensor, in the emulator: codes and factors are those of the CPU, bit for bit.

use driver::bytes_of;
use emu::{Emulator, Options, Schedule};
use flashcore::{DType, Element, Layout, Problem, Quantization, Quantized, Strides, quantize};
use half::{bf16, f16};
use kernels::{Arch, BufferKind, Program, ProgramBuffer};
use problem::{E4m3, Operand, Tensor};
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

/// The tensor's memory: draws in its rows, and NaN between the rows. Keys have means that differ from column
/// to column and from head to head.
fn memory<T: Element>(problem: &Problem, tensor: Tensor, round: impl Fn(f32) -> T, seed: u64) -> Vec<T> {
    let (elements, origin) = problem.span(tensor).unwrap();
    let [batch, heads, rows, dim] = problem.extents(tensor);
    let mut data = vec![round(f32::NAN); elements];
    let mut values = draws(batch * heads * rows * dim, seed);
    for (b, h, s) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |s| (b, h, s))))
    {
        let start = (origin as i64 + problem.strides(tensor).offset(b, h, s)) as usize;
        for (column, element) in data[start..start + dim].iter_mut().enumerate() {
            let mean = if tensor == Tensor::K { (column + 5 * h + 2 * b) % 9 } else { 0 };
            *element = round(values.next().unwrap() + mean as f32);
        }
    }
    data
}

/// Codes and factors that the emulator computes. Any finding is an error.
fn emulated(program: &Program, tensor: Tensor, data: &[u8], schedule: Schedule) -> (Vec<u8>, Vec<f32>) {
    let mut machine = Emulator::new(Options { schedule, ..Options::default() });
    let mut buffers: Vec<_> = Vec::new();
    for &ProgramBuffer { kind, bytes } in &program.contracts.buffers {
        let mut buffer = machine.allocate(bytes).unwrap();
        if kind == Operand::Tensor(tensor).into() {
            assert_eq!(bytes, data.len());
            machine.upload(&mut buffer, data).unwrap();
        }
        buffers.push(buffer);
    }
    for kernel in program.kernels() {
        let mut buffers: Vec<_> = buffers.iter_mut().collect();
        machine.launch(&kernel, &mut buffers).unwrap_or_else(|error| panic!("{}: {error}", kernel.entry));
    }
    let mut read = |wanted: BufferKind| {
        let at = program.contracts.buffers.iter().position(|buffer| buffer.kind == wanted).unwrap();
        let mut data = vec![0; program.contracts.buffers[at].bytes];
        machine.download(&buffers[at], &mut data).unwrap();
        data
    };
    let factors = read(Operand::Descale(tensor).into());
    let factors = factors.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    (read(BufferKind::Codes(tensor)), factors.collect())
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
    let (found, of_kernel) = emulated(&program, tensor, T::elements(data).bytes(), schedule);
    let what = format!("{tensor:?} of {problem:?}, {options:?}");
    let bits = |factors: &[f32]| factors.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&of_kernel), bits(&factors), "factors of {what}");
    if let Some(at) = (0..codes.len()).find(|&i| codes[i] != found[i]) {
        panic!("code {at} is {:#x}, should be {:#x}: {what}", found[at], codes[at]);
    }
    assert_eq!(found.len(), codes.len());
    program.contracts.steps.len()
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

fn smooth(rows: Option<u32>, hadamard: Option<u64>) -> Quantization {
    Quantization { smooth_keys: true, ..options(DType::E4m3, rows, hadamard) }
}

/// Two kernels compute the means, and the kernels that quantise subtract them.
#[test]
fn smoothed_keys_of_every_head_dim_type_and_block_of_rows() {
    let types = [DType::F16, DType::Bf16, DType::F32];
    for (case, dim) in [16, 48, 64, 80, 128, 192, 256, 272, 576].into_iter().enumerate() {
        for (variant, rows) in [None, Some(64), Some(128)].into_iter().enumerate() {
            let problem = Problem::new(2, 2, 150 - 7 * variant, dim, types[(case + variant) % 3]);
            let problem = problem.with_layout([Layout::Bshd, Layout::Bhsd][variant % 2]);
            let arch = [Arch::SM_89, Arch::SM_90, Arch::SM_120][variant];
            for hadamard in [None, Some(3 + case as u64)] {
                let kernels = agree_in(&problem, Tensor::K, &smooth(rows, hadamard), arch);
                assert!((3..=4).contains(&kernels), "{kernels}");
            }
        }
    }
}

/// One row, one part, a last part of one row, and more rows than the fewest of a part times the most parts.
#[test]
fn smoothed_keys_of_every_length() {
    let agree_with = |rows: usize, dim: usize, of_factor: Option<u32>| {
        let problem = Problem::new(1, 4, 1, dim, DType::F16).with_heads_kv(2, Layout::Bshd);
        let problem = problem.with_seq_kv(rows, Layout::Bshd);
        agree_in(&problem, Tensor::K, &smooth(of_factor, Some(1)), Arch::SM_90)
    };
    assert_eq!(agree_with(0, 64, None), 3);
    assert_eq!(agree_with(1, 64, Some(64)), 3);
    assert_eq!(agree_with(256, 64, None), 3);
    assert_eq!(agree_with(257, 64, None), 4);
    assert_eq!(agree_with(8300, 32, Some(128)), 3);
    // Q and V are not smoothed.
    let problem = Problem::new(1, 2, 100, 64, DType::F16);
    assert_eq!(agree_in(&problem, Tensor::Q, &smooth(None, None), Arch::SM_89), 1);
    assert_eq!(agree_in(&problem, Tensor::V, &smooth(None, None), Arch::SM_89), 1);
}

/// Attention of the smoothed keys is that of the original keys, but for the rounding to codes. With this, a
/// logit changes by at most `shift`, beside what all logits of a row have in common, and a weight by a factor
/// of at most `exp(2 · shift)`.
#[test]
fn attention_of_smoothed_keys_is_that_of_the_keys() {
    let problem = Problem::new(1, 4, 9, 64, DType::F32).with_heads_kv(2, Layout::Bshd);
    let problem = problem.with_seq_kv(300, Layout::Bshd);
    let [q, k, v] = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| memory(&problem, tensor, |x| x / 50.0, 8));
    let exact = oracle::oracle(&problem, &q, &k, &v).unwrap().out;
    let largest = v.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (rows, hadamard) in [(None, None), (None, Some(4)), (Some(64), Some(4))] {
        let options = smooth(rows, hadamard);
        let program = kernels::quantize::emit(&problem, Tensor::K, &options, &Arch::SM_90).unwrap();
        let (codes, factors) = emulated(&program, Tensor::K, bytes_of(&k), Schedule::Late);
        let of_head = factors.len() / 2;
        let factor = |row: usize| factors[row / 300 * of_head + row % 300 / rows.map_or(300, |n| n as usize)];
        let elements = codes.chunks_exact(64).enumerate().flat_map(|(row, codes)| {
            codes.iter().map(move |&code| factor(row) * E4m3::from_bits(code).to_f32())
        });
        let smoothed: Vec<f32> = elements.collect();
        // e4m3 has four significant bits. Below 2⁻⁶, its numbers have the distance 2⁻⁹.
        let off = |(i, x): (usize, &f32)| (x.abs() / 16.0).max(factor(i / 64) / 1024.0);
        let off = smoothed.iter().enumerate().map(off).fold(0.0, f32::max);
        let mut turned = q.clone();
        if let Some(rotation) = options.rotation(&problem, Tensor::K) {
            for row in turned.chunks_exact_mut(64) {
                rotation.apply(row);
                row.iter_mut().for_each(|x| *x *= rotation.norm());
            }
        }
        let length = |row: &[f32]| row.iter().map(|x| x.abs()).sum::<f32>();
        let length = turned.chunks_exact(64).map(length).fold(0.0, f32::max);
        let shift = 1.01 * off * length / 8.0;
        let bound = f64::from(largest * ((2.0 * shift).exp() - 1.0));
        assert!(bound < 0.5 * f64::from(largest), "the bound {bound} says nothing");
        let dense = Problem { k: Layout::Bhsd.strides(2, 300, 64), ..problem.clone() };
        let found = oracle::oracle(&dense, &turned, &smoothed, &v).unwrap().out;
        let worst = exact.iter().zip(&found).fold(0.0f64, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(worst <= bound, "{options:?}: {worst} > {bound}");
    }
}

/// Faults in the means change codes: a mean that is not subtracted, the mean of another head, and a last part
/// of the rows that is left out of the sum.
#[test]
fn faults_in_the_means_are_found() {
    for (rows, hadamard) in [(Some(64), Some(2)), (None, None)] {
        let problem = Problem::new(1, 2, 300, 80, DType::F16);
        let (options, data) = (smooth(rows, hadamard), memory(&problem, Tensor::K, f16::from_f32, 5));
        let expected = quantize(&problem, Tensor::K, &data, &options).unwrap();
        let program = kernels::quantize::emit(&problem, Tensor::K, &options, &Arch::SM_90).unwrap();
        let is_right = |program: &Program| {
            let (codes, factors) = emulated(program, Tensor::K, bytes_of(&data), Schedule::Late);
            codes == expected.codes && factors == expected.factors
        };
        assert!(is_right(&program));
        let text = program.module.to_string();
        // Changes lines of the text from the byte `from` on.
        let mutant = |from: usize, change: &dyn Fn(&str) -> Option<String>| {
            let (kept, changed) = text.split_at(from);
            let changed = changed.lines().map(|line| change(line).unwrap_or_else(|| line.to_owned()) + "\n");
            let changed = kept.to_owned() + &changed.collect::<String>();
            assert!(changed != text, "nothing was changed");
            Program { module: ptx::parse(&changed).unwrap().verify().unwrap(), ..program.clone() }
        };
        // The mean is subtracted in place.
        let is_subtraction = |line: &str| {
            let operands = line.trim().strip_prefix("sub.rn.f32 ");
            operands.is_some_and(|operands| {
                let mut operands = operands.split(", ");
                operands.next() == operands.next()
            })
        };
        let not_subtracted = mutant(0, &|line| is_subtraction(line).then(String::new));
        assert!(!is_right(&not_subtracted));
        // The last entries quantise. A row of means has 320 bytes.
        let means = text.find(".entry flash_quantize_means").unwrap();
        let quantise = means + text[means..].find("\n}\n").unwrap();
        let of_head = |line: &str| line.contains("mad.wide.u32") && line.contains(", 320, ");
        let of_another_head =
            mutant(quantise, &|line| of_head(line).then(|| line.replace(", 320, ", ", 0, ")));
        assert!(!is_right(&of_another_head));
        // The head has two parts. The second exists if there are more than one.
        let of_second = |line: &str| line.contains("setp.gt.u32") && line.ends_with(", 1;");
        let left_out = mutant(0, &|line| of_second(line).then(|| line.replace(", 1;", ", 2;")));
        assert!(!is_right(&left_out));
    }
}

/// Few rows are read once; more rows of a factor than a CTA holds, and groups of heads, are read twice.
#[test]
fn long_sequences_and_groups_of_heads() {
    let steps_on = |arch: Arch, heads: usize, heads_kv: usize, rows: usize, of_factor: Option<u32>| {
        let problem = Problem::new(2, heads, rows, 64, DType::F16).with_heads_kv(heads_kv, Layout::Bshd);
        agree_in(&problem, Tensor::Q, &options(DType::E4m3, of_factor, Some(1)), arch)
    };
    let steps = |heads: usize, heads_kv: usize, rows: usize, of_factor: Option<u32>| {
        steps_on(Arch::SM_90, heads, heads_kv, rows, of_factor)
    };
    assert_eq!(steps(2, 2, 1, None), 1);
    assert_eq!(steps(2, 2, 256, None), 1);
    assert_eq!(steps(2, 2, 257, None), 2);
    assert_eq!(steps(1, 1, 600, Some(128)), 1);
    // The heads of a group are a cluster, where there are clusters of that size.
    assert_eq!(steps(4, 2, 100, None), 1);
    assert_eq!(steps(8, 2, 150, Some(64)), 1);
    assert_eq!(steps_on(Arch::SM_120, 8, 1, 290, Some(128)), 1);
    assert_eq!(steps_on(Arch::SM_89, 4, 2, 100, None), 2);
    assert_eq!(steps(4, 2, 300, None), 2);
    assert_eq!(steps(6, 2, 150, Some(64)), 2);
    assert_eq!(steps(16, 1, 70, Some(64)), 2);
    assert_eq!(steps_on(Arch::SM_89, 80, 1, 140, Some(128)), 2);
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
            agree_in(&problem, tensor, &smooth(rows, Some(9)), Arch::SM_89);
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
    // A thread has one unit of a row, and four.
    for (dim, hadamard) in [(32, None), (32, Some(5)), (128, Some(5))] {
        for (dtype, rows) in [(DType::E4m3, Some(64)), (DType::E5m2, None)] {
            let options = options(dtype, rows, hadamard);
            let smooth = Quantization { smooth_keys: true, ..options };
            let problem = Problem::new(1, 2, 130, dim, DType::F32);
            for (i, &x) in special.iter().enumerate() {
                let mut data: Vec<f32> = draws(2 * 130 * dim, i as u64).collect();
                data[7] = x;
                data[64 * dim..128 * dim].fill(x);
                data[150 * dim + 3] = x;
                agree((&problem, Tensor::K), &data, &options, Arch::SM_90);
                agree((&problem, Tensor::K), &data, &smooth, Arch::SM_90);
                // All differences from the mean are 0.
                agree((&problem, Tensor::K), &vec![x; 2 * 130 * dim], &smooth, Arch::SM_90);
            }
            let tiny: Vec<f32> = draws(2 * 130 * dim, 5).map(|x| x * 1e-36).collect();
            agree((&problem, Tensor::K), &tiny, &options, Arch::SM_90);
            agree((&problem, Tensor::K), &tiny, &smooth, Arch::SM_90);
            // Sums of subnormal numbers, times a power of two below 1.
            let subnormal: Vec<f32> = draws(2 * 130 * dim, 5).map(|x| x * 1e-42).collect();
            agree((&problem, Tensor::K), &subnormal, &smooth, Arch::SM_90);
            let half = problem.with_dtypes(DType::F16.into());
            let mut data: Vec<f16> = draws(2 * 130 * dim, 6).map(f16::from_f32).collect();
            (data[0], data[1], data[70 * dim]) = (f16::INFINITY, f16::NAN, f16::NEG_INFINITY);
            agree((&half, Tensor::K), &data, &options, Arch::SM_89);
        }
    }
}
