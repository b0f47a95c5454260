//! Tests of tensors whose elements are more than 2^31 elements apart, in every family: offsets must have 64
//! bits. The emulator's buffers use memory only for rows.

use emu::{Buffer, Options, run};
use flashcore_kernels::{Arch, Family, Plan, emit};
use half::f16;
use problem::{Band, DType, Layout, Operand, PassKind, Problem, Strides, Tensor};

/// More than 2^31 elements, and a multiple of 8.
const FAR: i64 = (1 << 31) + 512;

/// Computes a row's elements from its index, so that rows differ.
fn row(index: [usize; 3], tensor: Tensor, dim: usize) -> Vec<f16> {
    let [batch, head, position] = index;
    let seed = 31 * batch + 17 * head + 7 * position + 3 * tensor as usize;
    (0..dim).map(|d| f16::from_f32(((seed + 5 * d) * 37 % 64) as f32 / 32.0 - 1.0)).collect()
}

/// The rows of a tensor, each with the byte at which it begins.
fn rows(problem: &Problem, tensor: Tensor) -> Vec<([usize; 3], usize)> {
    let [batch, heads, seq, _] = problem.extents(tensor);
    let (_, origin) = problem.span(tensor).unwrap();
    let mut all = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                let element = origin as i64 + problem.strides(tensor).offset(b, h, s);
                all.push(([b, h, s], 2 * element as usize));
            }
        }
    }
    all
}

/// The output rows of a run, in the order of [`rows`].
fn outputs(problem: &Problem, plan: &Plan, arch: &Arch) -> Vec<Vec<u8>> {
    let program = emit(problem, plan, arch).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let specs = &program.contracts.buffers;
    let mut buffers: Vec<Buffer> = specs.iter().map(|spec| Buffer::sparse(spec.bytes)).collect();
    for (buffer, spec) in buffers.iter_mut().zip(specs) {
        match spec.kind.operand() {
            Some(Operand::Tensor(tensor)) if tensor != Tensor::Out => {
                for (index, at) in rows(problem, tensor) {
                    let elements = row(index, tensor, problem.extents(tensor)[3]);
                    let bytes: Vec<u8> = elements.iter().flat_map(|x| x.to_le_bytes()).collect();
                    buffer.write_at(at, &bytes);
                }
            }
            Some(_) => {}
            // Counters are zero before each launch.
            None => buffer.write_at(0, &vec![0; spec.bytes]),
        }
    }
    // Collectives count as ordering: telling races within a warp apart needs a second run, hence copies of
    // the buffers.
    let options = Options { collectives_order: true, ..Options::default() };
    for kernel in program.kernels() {
        let report = run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options).unwrap();
        let failures: Vec<_> = report.hazards.iter().filter(|h| h.fails()).collect();
        assert!(failures.is_empty(), "{plan:?}: {}", failures[0]);
    }
    let out = specs.iter().position(|spec| spec.kind == Operand::OUT.into()).unwrap();
    let width = 2 * problem.head_dim_v;
    rows(problem, Tensor::Out).into_iter().map(|(_, at)| buffers[out].read_at(at..at + width)).collect()
}

/// Every tensor with neighbouring batch entries, heads or rows far apart gives the same bits as dense
/// tensors.
#[test]
fn tensors_beyond_2_31_elements_are_addressed() {
    let dense = Problem::new(2, 2, 40, 64, DType::F16).with_band(Band::CAUSAL).with_seq_kv(70, Layout::Bhsd);
    let far = |strides: Strides, which: usize| match which {
        0 => Strides { batch: FAR, ..strides },
        1 => Strides { head: FAR, batch: strides.head, ..strides },
        // The first and the last row are 2^31 elements apart.
        _ => Strides { row: FAR / 32, head: 128, batch: 256 },
    };
    for family in Family::of_pass(PassKind::Forward) {
        let plan = family.default_for(&dense, &Arch::SM_90).unwrap();
        let expected = outputs(&dense, &plan, &Arch::SM_90);
        for which in 0..3 {
            let mut problem = dense.clone();
            problem.q = far(dense.q, which);
            problem.k = far(dense.k, which);
            problem.v = far(dense.v, which);
            problem.out = far(dense.out, which);
            problem.check().unwrap();
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            assert!(outputs(&problem, &plan, &Arch::SM_90) == expected, "{family:?} {which}");
        }
    }
}

/// Keys and values are divided among CTAs, and each sequence uses a part of the cache.
#[test]
fn split_keys_beyond_2_31_elements_are_addressed() {
    let dense = Problem::new(2, 1, 1, 64, DType::F16).with_seq_kv(2000, Layout::Bhsd);
    let mut problem = dense.clone();
    (problem.k.batch, problem.v.batch) = (FAR, FAR + 64);
    let plan = Family::Mma.default_for(&problem, &Arch::SM_90).unwrap();
    assert!(matches!(&plan, Plan::Mma(plan) if plan.splits > 1), "{plan:?}");
    assert!(outputs(&problem, &plan, &Arch::SM_90) == outputs(&dense, &plan, &Arch::SM_90));
}

/// A stride that a tensor map cannot express is rejected with its value, and `mma` computes the problem.
#[test]
fn strides_beyond_tensor_maps_are_refused_by_their_families() {
    let mut problem = Problem::new(2, 2, 64, 64, DType::F16);
    problem.k.batch = 1 << 39;
    for family in [Family::Wgmma, Family::SmallStreamed, Family::SmallAtOnce] {
        let refused = family.default_for(&problem, &Arch::SM_90).unwrap_err().to_string();
        assert!(
            refused.contains("invalid value '549755813888' for k batch stride with family")
                && refused.contains("multiples of 8 from 0 to 2^39 elements, as tensor maps need"),
            "{refused}"
        );
    }
    assert!(matches!(Plan::default_for(&problem, &Arch::SM_90).unwrap(), Plan::Mma(_)));
}
