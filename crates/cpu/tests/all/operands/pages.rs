//! Keys and values in pages.

use super::*;
use problem::{E4m3, KeyPlaces};

/// Dense K or V, `[batch, head, row, dim]`, in the places that a page table gives. Elements that belong to no
/// key are poison.
fn in_pages<T: Element>(p: &Problem, operands: &Operands<'_>, tensor: Tensor, dense: &[T]) -> Vec<T> {
    let (elements, [_, heads, _, dim]) = (p.span(tensor).unwrap().0, p.extents(tensor));
    let mut pool = vec![T::from_f32(f32::NAN); elements];
    let places = KeyPlaces::of(p, operands);
    for s in p.sequences(operands).unwrap() {
        for (head, row) in (0..heads).flat_map(|h| (0..s.kv.len).map(move |row| (h, s.kv.start + row))) {
            let (page, at) = places.place(s.kv.batch, row);
            let from = ((s.kv.batch * heads + head) * p.seq_kv + row) * dim;
            let to = p.strides(tensor).offset(page, head, at) as usize;
            pool[to..to + dim].copy_from_slice(&dense[from..from + dim]);
        }
    }
    pool
}

/// Sequences of all lengths around `page`, with rows in `layout`, and the operands of the dense problem and
/// of the problem in pages.
fn cases(page: usize, group: usize, dtype: DType) -> (Problem, Others, Problem, Others) {
    let lengths = [0, 1, page - 1, page, page + 1, 97, 2 * page + 31];
    let longest = *lengths.iter().max().unwrap();
    // Head dims of whole vectors, and others.
    let dim = if page.is_multiple_of(2) { 32 } else { 24 };
    let mut dense = Problem::new(lengths.len(), 2 * group, 2, dim, dtype).with_band(Band::CAUSAL);
    (dense.heads_kv, dense.seq_kv, dense.head_dim_v) = (2, longest, 16);
    dense = dense.with_layout(Layout::Bhsd);
    dense.lengths.kv.used = true;
    let used: Vec<i32> = lengths.iter().map(|&n| n as i32).collect();
    let others = Others::from_iter([(Operand::Lengths(LengthArray::UsedKv), used.into())]);
    let per_sequence = longest.div_ceil(page);
    let entries = (lengths.len() * per_sequence) as i32;
    let paged = dense.clone().with_pages(page, entries as usize + 2);
    // From the last page down; the first entry of the first sequence, which has no key, is no page.
    let mut table: Vec<i32> = (0..entries).rev().collect();
    table[0] = -1;
    let mut of_pages = others.clone();
    of_pages.insert(Operand::PageTable, table.into());
    (dense, others, paged, of_pages)
}

/// Pages change no bit of the results, in any arithmetic.
#[test]
fn pages_change_no_bits() {
    fn of<T: Element>(dtype: DType, isa: Isa, (page, group): (usize, usize)) {
        let (dense, others, paged, of_pages) = cases(page, group, dtype);
        let inputs = Inputs::<T>::random(&dense, page as u64, 2.0);
        let operands = slices(&of_pages);
        let pool = |tensor, elements: &[T]| in_pages(&paged, &operands, tensor, elements);
        let in_pages =
            Inputs { q: inputs.q.clone(), k: pool(Tensor::K, &inputs.k), v: pool(Tensor::V, &inputs.v) };
        for plan in plans(isa) {
            let want = run(&dense, &inputs, &others, &plan, true);
            let found = run(&paged, &in_pages, &of_pages, &plan, true);
            let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
            assert!(bits(&want.0) == bits(&found.0), "{plan:?} {page} {group}");
            assert!(bits(&want.1) == bits(&found.1), "{plan:?} {page} {group}");
        }
    }
    let isas: Vec<Isa> = everywhere().collect();
    for (turn, page) in [1, 3, 16, 64, 256].into_iter().enumerate() {
        for (i, &isa) in isas.iter().enumerate() {
            let group = [1, 4, 5, 8][(turn + i) % 4];
            match (turn + i) % 3 {
                0 => of::<f32>(DType::F32, isa, (page, group)),
                1 => of::<f16>(DType::F16, isa, (page, group)),
                _ => of::<bf16>(DType::Bf16, isa, (page, group)),
            }
        }
    }
}

/// 8-bit pages beside 16-bit ones: keys and values of both are gathered, and judged by the oracle.
#[test]
fn pages_of_8_bits() {
    for dtypes in ["e4m3:f32", "e4m3/e4m3/bf16"] {
        let (dense, _, mut paged, of_pages) = cases(16, 4, DType::F32);
        paged.dtypes = dtypes.parse().unwrap();
        let inputs = Inputs::<f32>::random(&dense, 3, 1.0);
        let operands = slices(&of_pages);
        let pool = |tensor, dense: &[f32]| in_pages(&paged, &operands, tensor, dense);
        let codes = |x: &[f32]| x.iter().map(|&x| E4m3::from_f32(x)).collect::<Vec<E4m3>>();
        let (q, k) = (codes(&inputs.q), codes(&pool(Tensor::K, &inputs.k)));
        let v = pool(Tensor::V, &inputs.v);
        let (v8, v16) = (codes(&v), v.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<bf16>>());
        let mut all = match paged.dtypes.v {
            DType::E4m3 => Operands::qkv(&q, &k, &v8),
            _ => Operands::qkv(&q, &k, &v16),
        };
        all.extend(operands.iter().map(|(operand, &elements)| (operand, elements)));
        let want = oracle_with(&paged, &all).unwrap();
        let naive = reference_in_precision_with(&paged, &all).unwrap();
        let plan = CpuPlan::for_problem(&paged);
        let mut lse = vec![0.0; paged.lse_len()];
        let elements = paged.span(Tensor::Out).unwrap().0;
        let out: Vec<f64> = match paged.dtypes.out {
            DType::F32 => {
                let mut out = vec![0.0f32; elements];
                attention_with(&paged, &kernel_inputs(&all), &mut out, Some(&mut lse), &plan).unwrap();
                out.into_iter().map(f64::from).collect()
            }
            _ => {
                let mut out = vec![bf16::ZERO; elements];
                attention_with(&paged, &kernel_inputs(&all), &mut out, Some(&mut lse), &plan).unwrap();
                out.into_iter().map(f64::from).collect()
            }
        };
        let lse: Vec<f64> = lse.into_iter().map(f64::from).collect();
        close_to(&paged, &plan, (&out, &lse), &want, &naive);
    }
}

/// Entries that the lengths reach must be pages of the pool.
#[test]
fn entries_that_are_no_pages_are_refused() {
    let (_, _, paged, mut of_pages) = cases(3, 1, DType::F32);
    for (entry, told) in [(-1, "'-1'"), (i32::MAX, "'2147483647'"), (1000, "'1000'")] {
        let operands = slices(&of_pages);
        let problem::Elements::I32(table) = operands[Operand::PageTable] else { panic!("no table") };
        let mut table = table.to_vec();
        let per_sequence = table.len() / paged.batch;
        table[6 * per_sequence + 1] = entry;
        of_pages.insert(Operand::PageTable, table.into());
        let (q, k) = (paged.span(Tensor::Q).unwrap().0, paged.span(Tensor::K).unwrap().0);
        let v = paged.span(Tensor::V).unwrap().0;
        let inputs = Inputs { q: vec![0.0f32; q], k: vec![0.0; k], v: vec![0.0; v] };
        let error = refused_with(&paged, &inputs, &of_pages).to_string();
        let expected = format!("invalid value {told} for page_table[6][1]: expected 0 to ");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// The error of a call.
fn refused_with(problem: &Problem, inputs: &Inputs<f32>, others: &Others) -> CpuError {
    let (elements, _) = problem.span(Tensor::Out).unwrap();
    let mut out = vec![0.0f32; elements];
    let operands = all(inputs, others);
    attention_with(problem, &kernel_inputs(&operands), &mut out, None, &small_plan(Isa::best())).unwrap_err()
}
