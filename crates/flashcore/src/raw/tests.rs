use problem::{LengthArray, Problem};

use super::*;
use crate::{
    E4m3, Layout, LengthValues, ScaleLayout, ScaleValues, Scales, Strides, TableView, TensorView,
    TensorViewMut, attention,
};

const HEADS: usize = 4;
const DIM: usize = 16;

fn ramp(n: usize, step: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * step) % 17) as f32 / 8.0 - 1.0).collect()
}

fn eight(n: usize, step: usize) -> Vec<E4m3> {
    ramp(n, step).into_iter().map(E4m3::from_f32).collect()
}

fn dense<T>(data: &[T], dtype: ElementType, shape: &[usize]) -> Tensor {
    Tensor { address: data.as_ptr() as u64, view: View::dense(dtype, shape).unwrap() }
}

/// Calls with outputs of their own, which are returned: O and the LSE.
fn called(
    inputs: &[(Operand, Tensor)],
    rows: [usize; 3],
    options: &CallOptions,
) -> Result<(Vec<f32>, Vec<f32>), AttentionError> {
    let [batch, heads, rows] = rows;
    let (out, lse) = (vec![7.0f32; batch * heads * rows * DIM], vec![7.0f32; batch * heads * rows]);
    let mut operands: OperandMap<Tensor> = inputs.iter().copied().collect();
    operands.insert(Operand::OUT, dense(&out, ElementType::F32, &[batch, heads, rows, DIM]));
    operands.insert(Operand::Lse, dense(&lse, ElementType::F32, &[batch, heads, rows]));
    let options = CallOptions { pass: Pass::forward(true), ..options.clone() };
    // SAFETY: the tests describe arrays that they hold.
    unsafe { prepare(Queue::host(), &operands, &options)?.enqueue()? };
    Ok((out, lse))
}

/// Packed queries and used keys, sinks, a bias and a cap, with rows in the order of decreasing addresses.
#[test]
fn calls_with_every_feature_compute_what_the_facade_computes() {
    let (q, k, v) = (ramp(9 * HEADS * DIM, 3), ramp(2 * 7 * 2 * DIM, 5), ramp(2 * 7 * 2 * DIM, 11));
    let (starts, used, sinks, bias) = ([0, 4, 9], [7, 3], ramp(HEADS, 7), ramp(HEADS, 2));
    let lengths = LengthValues { cumulative_q: &starts, used_kv: &used, ..LengthValues::default() };
    let back = Strides { batch: 0, head: DIM as i64, row: -((HEADS * DIM) as i64) };
    let keys = |data| TensorView::dense(data, [2, 2, 7, DIM], Layout::Bshd).unwrap();
    let queries = TensorView::strided(&q, [1, HEADS, 9, DIM], back).unwrap();
    let call = attention(queries, keys(&k), keys(&v)).lengths(lengths).sink(&sinks).softcap(3.0).window(2, 0);
    let bias_view = TableView::dense(&bias[..], &[1, HEADS, 1, 1]).unwrap();
    let expected = call.bias(bias_view).device(crate::Device::Cpu).run().unwrap();

    let kv = |data: &[f32]| Tensor {
        address: data.as_ptr() as u64,
        view: View::rows(ElementType::F32, [2, 2, 7, DIM], Layout::Bshd.strides(2, 7, DIM)),
    };
    let last = &q[8 * HEADS * DIM..]; // row 0
    let q = Tensor {
        address: last.as_ptr() as u64,
        view: View::rows(ElementType::F32, [1, HEADS, 9, DIM], back),
    };
    let table = View::new(ElementType::F32, &[2, HEADS, 5, 7], &[0, 1, 0, 0]).unwrap();
    let mut inputs = vec![
        (Operand::Q, q),
        (Operand::K, kv(&k)),
        (Operand::V, kv(&v)),
        (Operand::Lengths(LengthArray::CumulativeQ), dense(&starts, ElementType::I32, &[3])),
        (Operand::Lengths(LengthArray::UsedKv), dense(&used, ElementType::I32, &[2])),
        (Operand::Sinks, dense(&sinks, ElementType::F32, &[HEADS])),
        (Operand::Table(0), Tensor { address: bias.as_ptr() as u64, view: table }),
    ];
    let options = CallOptions {
        band: Band::window(2, 0),
        softcap: Some(3.0),
        score: Some("s + t0[b, h, q, k]".parse().unwrap()),
        longest: [Some(5), None],
        ..CallOptions::default()
    };
    let expected = (expected.data, expected.lse);
    for _ in 0..2 {
        // The second time, with the plan that was kept.
        assert_eq!(called(&inputs, [1, HEADS, 9], &options).as_ref(), Ok(&expected));
    }

    for lost in 0..inputs.len() {
        let (operand, tensor) = inputs.remove(lost);
        match called(&inputs, [1, HEADS, 9], &options) {
            // An operand that is not given is not part of the problem.
            Ok(other) => {
                let may_be_lost = [Operand::Sinks, Operand::Lengths(LengthArray::UsedKv)].contains(&operand);
                assert!(other != expected && may_be_lost, "{operand}");
            }
            Err(error) => {
                let error = error.to_string();
                let named = error.contains(operand.name()) || error.contains("t0") || error.contains("batch");
                assert!(named, "{operand}: {error}");
            }
        }
        let other = if tensor.view.dtype == ElementType::I32 { ElementType::F32 } else { ElementType::I32 };
        let typed = Tensor { view: View { dtype: other, ..tensor.view }, ..tensor };
        let odd = Tensor { address: tensor.address + 1, ..tensor };
        for (wrong, words) in [(typed, other.name()), (odd, "expected a multiple of 4 bytes")] {
            inputs.insert(lost, (operand, wrong));
            let error = called(&inputs, [1, HEADS, 9], &options).unwrap_err().to_string();
            let typed = matches!(operand, Operand::Table(_)) && wrong == typed;
            assert!(typed || (error.contains(operand.name()) && error.contains(words)), "{operand}: {error}");
            inputs.remove(lost);
        }
        inputs.insert(lost, (operand, tensor));
    }
}

/// Gradients with sinks, a bias and packed lengths are those of the façade, and outputs that do not fit are
/// refused by name.
#[test]
fn gradients_are_those_of_the_facade() {
    let (q, k, v) = (ramp(9 * HEADS * DIM, 3), ramp(8 * 2 * DIM, 5), ramp(8 * 2 * DIM, 11));
    let (starts, ends, sinks, bias) = ([0, 4, 9], [0, 5, 8], ramp(HEADS, 7), ramp(HEADS, 2));
    let d_out = ramp(9 * HEADS * DIM, 13);
    let lengths = LengthValues { cumulative_q: &starts, cumulative_kv: &ends, ..LengthValues::default() };
    let rows = |data, heads, rows| TensorView::dense(data, [1, heads, rows, DIM], Layout::Bhsd).unwrap();
    let call = attention(rows(&q, HEADS, 9), rows(&k, 2, 8), rows(&v, 2, 8)).lengths(lengths).sink(&sinks);
    let bias_view = TableView::dense(&bias[..], &[1, HEADS, 1, 1]).unwrap();
    let call = call.bias(bias_view).causal().device(crate::Device::Cpu);
    let forward = call.clone().run().unwrap();
    let expected =
        call.backward(rows(&forward.data, HEADS, 9), &forward.lse, rows(&d_out, HEADS, 9)).unwrap();

    let [dq, dk, dv] = [9 * HEADS, 8 * 2, 8 * 2].map(|rows| vec![0.0f32; rows * DIM]);
    let (d_sinks, d_bias) = (vec![7.0f32; HEADS], vec![7.0f32; HEADS]);
    let float = |data: &[f32], shape: &[usize]| dense(data, ElementType::F32, shape);
    let (of_q, of_kv) = ([1, HEADS, 9, DIM], [1, 2, 8, DIM]);
    let table = View::new(ElementType::F32, &[2, HEADS, 5, 5], &[0, 1, 0, 0]).unwrap();
    let tensor = |tensor: problem::Tensor| Operand::Tensor(tensor);
    let mut operands: OperandMap<Tensor> = [
        (Operand::Q, float(&q, &of_q)),
        (Operand::K, float(&k, &of_kv)),
        (Operand::V, float(&v, &of_kv)),
        (Operand::OUT, float(&forward.data, &of_q)),
        (Operand::Lse, float(&forward.lse, &[HEADS, 9])),
        (Operand::Lengths(LengthArray::CumulativeQ), dense(&starts, ElementType::I32, &[3])),
        (Operand::Lengths(LengthArray::CumulativeKv), dense(&ends, ElementType::I32, &[3])),
        (Operand::Sinks, float(&sinks, &[HEADS])),
        (Operand::Table(0), Tensor { address: bias.as_ptr() as u64, view: table }),
        (tensor(problem::Tensor::DOut), float(&d_out, &of_q)),
        (tensor(problem::Tensor::Dq), float(&dq, &of_q)),
        (tensor(problem::Tensor::Dk), float(&dk, &of_kv)),
        (tensor(problem::Tensor::Dv), float(&dv, &of_kv)),
        (Operand::DSinks, float(&d_sinks, &[HEADS])),
        (Operand::DTable(0), float(&d_bias, &[HEADS])),
    ]
    .into_iter()
    .collect();
    let wants = problem::Gradients { sinks: true, tables: 1 };
    let options = CallOptions {
        pass: Pass::Backward { deterministic: true, d_lse: false, wants },
        band: Band::CAUSAL,
        score: Some("s + t0[b, h, q, k]".parse().unwrap()),
        longest: [Some(5), Some(5)],
        ..CallOptions::default()
    };
    let run = |operands: &OperandMap<Tensor>| {
        // SAFETY: the arrays outlive the call.
        unsafe { prepare(Queue::host(), operands, &options)?.enqueue() }
    };
    run(&operands).unwrap();
    assert_eq!((dq, dk, dv), (expected.dq, expected.dk, expected.dv));
    assert_eq!((d_sinks, &d_bias), (expected.d_sinks, expected.d_tables.last().unwrap()));

    let refused = |operands: &OperandMap<Tensor>| run(operands).unwrap_err().to_string();
    let d_out = operands[tensor(problem::Tensor::DOut)];
    let change = |view: View| {
        let mut operands = operands.clone();
        operands.insert(tensor(problem::Tensor::DOut), Tensor { view, ..d_out });
        refused(&operands)
    };
    let shape = change(View::dense(ElementType::F32, &[1, HEADS, 8, DIM]).unwrap());
    assert_eq!(shape, "d_out has sequence length = 8, but out has 9; they must be equal");
    let dtype = change(View::dense(ElementType::F16, &of_q).unwrap());
    assert!(dtype.contains("'f16' for the element type of d_out: expected f32"), "{dtype}");
    let strided = change(View::new(ElementType::F32, &of_q, &[1, 9, 1, 0]).unwrap());
    assert_eq!(strided, "d_out's last dimension has stride 0; it must be contiguous (stride 1)");
    for operand in [Operand::Lse, tensor(problem::Tensor::Dk), Operand::DTable(0)] {
        let lost = operands.remove(operand).unwrap();
        assert_eq!(refused(&operands), format!("{operand} is missing: the problem has it"));
        operands.insert(operand, lost);
    }
}

#[test]
fn factors_of_eight_bit_inputs() {
    let data = [3, 5, 11].map(|step| eight(HEADS * 6 * DIM, step));
    let factors = [vec![0.5], vec![2.0, 0.25, 1.0, 3.0], ramp(HEADS, 3)];
    let shape = [1, HEADS, 6, DIM];
    let [q, k, v] = data.each_ref().map(|data| TensorView::dense(data, shape, Layout::Bhsd).unwrap());
    let per_head = Some(ScaleLayout::per_head(HEADS));
    let layouts = Scales { q: Some(ScaleLayout::TENSOR), k: per_head, v: per_head };
    let values = ScaleValues { q: &factors[0], k: &factors[1], v: &factors[2] };
    let (mut out, mut lse) = (vec![0.0f32; HEADS * 6 * DIM], vec![0.0; HEADS * 6]);
    let to = TensorViewMut::dense(&mut out, shape, Layout::Bhsd).unwrap();
    let call = attention(q, k, v).scales(layouts, values).device(crate::Device::Cpu);
    call.run_into(to, Some(&mut lse)).unwrap();

    let tensors = data.each_ref().map(|data| dense(data, ElementType::E4m3, &shape));
    let mut inputs: Vec<_> = [Operand::Q, Operand::K, Operand::V].into_iter().zip(tensors).collect();
    for (tensor, (values, strides)) in [problem::Tensor::Q, problem::Tensor::K, problem::Tensor::V]
        .into_iter()
        .zip(factors.iter().zip([[0, 0], [4, 1], [4, 1]]))
    {
        let view = View::new(ElementType::F32, &[1, HEADS], &strides).unwrap();
        inputs.push((Operand::Descale(tensor), Tensor { address: values.as_ptr() as u64, view }));
    }
    let rows = [1, HEADS, 6];
    assert_eq!(called(&inputs, rows, &CallOptions::default()), Ok((out, lse)));
    let blocks = CallOptions { scale_rows: [0, 64, 0], ..CallOptions::default() };
    let error = called(&inputs, rows, &blocks).unwrap_err().to_string();
    assert_eq!(error, "invalid value '[1, 4]' for the shape of descale_k: expected [1, 4, 1]");
}

#[test]
fn refusals_name_the_operand() {
    let x = ramp(2 * 8 * DIM, 3);
    let of = |shape: &[usize]| dense(&x, ElementType::F32, shape);
    let plain = [1, 2, 8, DIM];
    let refused = |q: Tensor, k: Tensor, v: Tensor, more: &[(Operand, Tensor)], words: &str| {
        let inputs = [(Operand::Q, q), (Operand::K, k), (Operand::V, v)];
        let inputs: Vec<_> = inputs.into_iter().chain(more.iter().copied()).collect();
        let error = called(&inputs, [1, 2, 8], &CallOptions::default()).unwrap_err().to_string();
        assert_eq!(error, words);
    };
    let x4 = of(&plain);
    refused(x4, of(&[2, 2, 4, DIM]), x4, &[], "k has batch = 2, but q has 1; they must be equal");
    refused(x4, x4, of(&[1, 1, 8, DIM]), &[], "v has heads = 1, but k has 2; they must be equal");
    refused(x4, x4, of(&[1, 2, 4, DIM]), &[], "v has sequence length = 4, but k has 8; they must be equal");
    let three = "invalid value '3' for the number of dimensions of k: expected 4: batch, head, row, dim";
    refused(x4, of(&[2, 8, DIM]), x4, &[], three);
    let wide = Tensor { view: View { strides: [256, 128, 1, 8], ..x4.view }, ..x4 };
    refused(wide, x4, x4, &[], "q's last dimension has stride 8; it must be contiguous (stride 1)");
    let null = Tensor { address: 0, ..x4 };
    let told = "invalid value '0x0' for the address of v: expected a multiple of 4 bytes";
    refused(x4, x4, null, &[], told);
    let sinks = of(&[3]);
    let told = "invalid value '3' for the number of elements of sinks: expected 2";
    refused(x4, x4, x4, &[(Operand::Sinks, sinks)], told);
    let view = View::new(ElementType::F32, &[2], &[2]).unwrap();
    let told = "invalid value '[2] for shape [2]' for the strides of sinks: expected dense elements";
    refused(x4, x4, x4, &[(Operand::Sinks, Tensor { view, ..x4 })], told);
    let starts = [0, 8];
    let starts = (Operand::Lengths(LengthArray::CumulativeKv), dense(&starts, ElementType::I32, &[2]));
    let told = "invalid value '2' for the batch of k: expected 1, since cu_seqlens packs all sequences";
    refused(x4, of(&[2, 2, 4, DIM]), of(&[2, 2, 4, DIM]), &[starts], told);
    let told = "invalid value '5 with 5 strides' for the number of dimensions of a tensor: expected at most \
                4, each with a stride";
    assert_eq!(View::dense(ElementType::F32, &[1; 5]).unwrap_err().to_string(), told);
}

/// Without rows, nothing is computed, but what is wrong in the call is still refused.
#[test]
fn calls_without_rows_do_nothing() {
    let empty = dense(&[0f32; 0], ElementType::F32, &[1, 2, 0, DIM]);
    let inputs = [Operand::Q, Operand::K, Operand::V].map(|operand| (operand, empty));
    assert_eq!(called(&inputs, [1, 2, 0], &CallOptions::default()), Ok((vec![], vec![])));
    let options = CallOptions { scale: Some(f32::NAN), ..CallOptions::default() };
    let error = called(&inputs, [1, 2, 0], &options).unwrap_err();
    assert!(error.to_string().contains("'NaN' for scale"), "{error}");
}

/// The views of a problem's operands state the problem again, for each kind of problem that operands state.
#[test]
fn a_problem_is_stated_by_its_operands() {
    let plain = Problem::new(2, 4, 8, 16, crate::DType::F16).with_heads_kv(2, Layout::Bshd);
    let mut packed = plain.clone().with_lse(true).with_band(Band::CAUSAL);
    packed.lengths.q.packed = Some(13);
    packed.lengths.kv.used = true;
    packed.score.sink = true;
    let mut programs = plain.clone();
    programs.programs.score = Some("s * f0 + t0[h] + t1[b]".parse().unwrap());
    programs.programs.floats = vec![2.0];
    programs.programs.tables =
        [4, 2].map(|extent| problem::Table::dense(ElementType::Bf16, &[extent])).into();
    let mut backward = plain.clone();
    (backward.pass, backward.gradients.dk) = (Pass::BACKWARD, Some(Layout::Bhsd.strides(2, 8, 16)));
    let paged = plain.clone().with_pages(3, 9);
    for p in [plain, packed, programs, backward, paged] {
        let view = |operand| match operand {
            Operand::Tensor(tensor) => View::rows(p.dtypes.of(tensor), p.extents(tensor), p.strides(tensor)),
            Operand::Table(i) => {
                let table = &p.programs.tables[usize::from(i)];
                View::new(table.dtype, &table.extents, &table.strides).unwrap()
            }
            Operand::PageTable => View::dense(ElementType::I32, &[2, 3]).unwrap(),
            operand => {
                let spec = p.operand(operand).unwrap();
                View::dense(spec.dtype, &[spec.elements]).unwrap()
            }
        };
        let views: OperandMap<View> = p.operands().map(|spec| (spec.operand, view(spec.operand))).collect();
        let options = CallOptions {
            pass: p.pass,
            band: p.band,
            score: p.programs.score.clone(),
            floats: p.programs.floats.clone(),
            longest: [Some(p.seq_q), Some(p.seq_kv)],
            ..CallOptions::default()
        };
        let stated = problem_of(&views, |view| view, &options).unwrap();
        let strides = |p: &Problem| p.tensors().iter().map(|&tensor| p.strides(tensor)).collect::<Vec<_>>();
        assert_eq!(strides(&stated), strides(&p));
        assert_eq!(Problem { gradients: p.gradients, ..stated }, p);
        if let Some(pages) = p.storage.pages() {
            // The longest sequence may be stated as more than the pages hold.
            let options = CallOptions { longest: [Some(p.seq_q), Some(1000)], ..options };
            let stated = problem_of(&views, |view| view, &options).unwrap();
            assert_eq!((stated.seq_kv, stated.check()), (pages.per_sequence * pages.rows, Ok(())));
        }
    }
}

/// A V that is the first columns of K in memory is stated as such, and gives what a copy of V gives.
#[test]
fn values_in_keys_are_a_view() {
    const WIDE: usize = 24;
    let (q, k) = (ramp(2 * HEADS * 3 * WIDE, 3), ramp(2 * 7 * WIDE, 5));
    let copy: Vec<f32> = k.chunks(WIDE).flat_map(|row| &row[..DIM]).copied().collect();
    let float = ElementType::F32;
    let keys = dense(&k, float, &[2, 1, 7, WIDE]);
    let of_row = WIDE as i64;
    // The stride of the only head has no effect.
    let view = View::new(float, &[2, 1, 7, DIM], &[7 * of_row, 5, of_row, 1]).unwrap();
    let in_keys = Tensor { view, ..keys };
    let apart = dense(&copy, float, &[2, 1, 7, DIM]);
    let shifted = Tensor { address: keys.address + 4, ..in_keys };
    let narrow = Tensor { view: View::new(float, &[2, 1, 6, DIM], view.strides()).unwrap(), ..in_keys };
    let inputs =
        |v| [(Operand::Q, dense(&q, float, &[2, HEADS, 3, WIDE])), (Operand::K, keys), (Operand::V, v)];
    for (v, expected) in [(in_keys, true), (apart, false), (shifted, false), (keys, false), (narrow, false)] {
        assert_eq!(v_in_k(&inputs(v).into_iter().collect()), expected, "{v:?}");
    }
    let options = CallOptions::default();
    let of_view = called(&inputs(in_keys), [2, HEADS, 3], &options).unwrap();
    assert_eq!(of_view, called(&inputs(apart), [2, HEADS, 3], &options).unwrap());
    assert_ne!(of_view, called(&inputs(shifted), [2, HEADS, 3], &options).unwrap());
}

/// A call appends keys in place and attends to all of them; refused lengths change nothing.
#[test]
fn appended_keys_are_attended_to() {
    const ROOM: usize = 5;
    let number = |i: usize| (i * 37 % 64) as f32 / 32.0 - 1.0;
    let q: Vec<f32> = (0..2 * 8).map(number).collect(); // two sequences, one head, one row, head dim 8
    let (new_k, new_v) = ([0.5f32; 2 * 8], [2.0f32; 2 * 8]);
    let mut caches = [(); 2].map(|()| vec![f32::NAN; 2 * ROOM * 8]);
    caches[0][ROOM * 8..][..8].fill(1.0); // the second sequence has one key
    caches[1][ROOM * 8..][..8].fill(4.0);
    let (cos, sin) = ([0.0f32; 3 * 2], [1.0f32; 3 * 2]); // a quarter turn at each position
    let view = |rows: usize| View::dense(ElementType::F32, &[2, 1, rows, 8]).unwrap();
    let table = View::dense(ElementType::F32, &[3, 2]).unwrap();
    let mut call = |lengths: [i32; 2]| {
        let mut out = [0.0f32; 2 * 8];
        let mut operands = OperandMap::default();
        let lengths_view = View::dense(ElementType::I32, &[2]).unwrap();
        for (operand, address, view) in [
            (Operand::Q, q.as_ptr() as u64, view(1)),
            (Operand::K, caches[0].as_mut_ptr() as u64, view(ROOM)),
            (Operand::V, caches[1].as_mut_ptr() as u64, view(ROOM)),
            (Operand::OUT, out.as_mut_ptr() as u64, view(1)),
            (Operand::Lengths(LengthArray::UsedKv), lengths.as_ptr() as u64, lengths_view),
        ] {
            operands.insert(operand, Tensor { address, view });
        }
        let tensor = |address: &[f32], view| Tensor { address: address.as_ptr() as u64, view };
        let rotary = Rotary {
            cos: tensor(&cos, table),
            sin: tensor(&sin, table),
            interleaved: false,
            positions: None,
        };
        let (keys, values) = (tensor(&new_k, view(1)), tensor(&new_v, view(1)));
        let append = Append { keys, values, starts: None, rotary: Some(rotary) };
        let ready = prepare_append(Queue::host(), &operands, &CallOptions::default(), Some(&append))?;
        // SAFETY: the addresses are those of arrays with such shapes, which outlive the call.
        unsafe { ready.enqueue() }?;
        Ok::<_, AttentionError>((out, caches.clone()))
    };
    for (lengths, told) in [([0, 5], "'5' for cache_seqlens[1]"), ([-1, 0], "'-1' for cache_seqlens[0]")] {
        let refused = call(lengths).unwrap_err().to_string();
        assert!(refused.contains(told), "{refused}");
    }
    let beyond = call([0, 3]).unwrap_err().to_string();
    assert!(
        beyond.contains("'3' for cache_seqlens[1]") && beyond.contains("rotary_cos has 3 rows"),
        "{beyond}"
    );
    let (out, [keys, values]) = call([0, 1]).unwrap();
    // Dims 0 and 1 have partners 2 and 3, and the others are not rotated.
    let turned = [-0.5, -0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5];
    assert_eq!((&keys[..8], &keys[(ROOM + 1) * 8..][..8]), (&turned[..], &turned[..]));
    assert_eq!((&values[..8], &values[(ROOM + 1) * 8..][..8]), (&[2.0; 8][..], &[2.0; 8][..]));
    assert!(keys[8..ROOM * 8].iter().all(|x| x.is_nan()) && out[..8] == [2.0; 8]);
    assert!(out[8..].iter().all(|&x| 2.0 < x && x < 4.0 && x == out[8]), "{out:?}");
}
