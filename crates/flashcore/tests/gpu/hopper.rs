//! Families of Hopper.

use super::*;

/// Hopper's families from end to end: tensor maps of changing addresses, clusters, counters, scratch, graphs.
pub fn hopper() {
    let gpu = Gpu::open(0).unwrap();
    let problem = Problem::new(1, 2, 70, 64, DType::F16).with_band(Band::CAUSAL);
    let unmasked = problem.clone().with_band(Band::FULL);
    let shared = WgmmaPlan {
        consumers: 1,
        block_n: 16,
        turns: Turns::Free,
        ends: Ends::Common,
        handout: Handout::Static,
        tail: Tail::Shared,
        ..WgmmaPlan::default_for(&unmasked, gpu.arch())
    };
    for family in [Family::SmallAtOnce, Family::SmallStreamed, Family::Wgmma] {
        hopper_plan(&gpu, &problem, &family.default_for(&problem, gpu.arch()).unwrap());
    }
    hopper_plan(&gpu, &unmasked, &Plan::Wgmma(shared));
    hopper_bias(&gpu, &unmasked);
    hopper_gradients(&gpu);
}

/// Gradients of few keys, whose tile is divided among CTAs: two lengths with other numbers of parts, which
/// have one code, and one without parts.
fn hopper_gradients(gpu: &Gpu) {
    let stream = Stream::new(gpu.context()).unwrap();
    let mut divided = Vec::new();
    for rows in [600, 1500, 100] {
        let [q, d_out] = [3, 11].map(|step| ramp(2 * rows * 64, step));
        let k = ramp(100 * 64, 5);
        let view = |data, heads, rows| TensorView::dense(data, [1, heads, rows, 64], Layout::Bhsd).unwrap();
        let call = attention(view(&q, 2, rows), view(&k, 1, 100), view(&k, 1, 100)).device(Device::Cpu);
        let forward = call.clone().run().unwrap();
        let exact = call.backward(view(&forward.data, 2, rows), &forward.lse, view(&d_out, 2, rows)).unwrap();
        let problem = Problem { heads_kv: 1, seq_kv: 100, ..Problem::new(1, 2, rows, 64, DType::F16) };
        let problem = problem.with_layout(Layout::Bhsd).with_pass(flashcore::Pass::BACKWARD);
        let prepared = gpu.prepare(&problem, None).unwrap();
        let Plan::BackwardFused(plan) = prepared.plan() else { panic!("{:?}", prepared.plan()) };
        divided.push(plan.row_parts);
        let tensors = [&q, &k, &forward.data[..], &d_out];
        let buffers = gradients::buffers(gpu, &problem, (tensors, &forward.lse), 0);
        let slices: Vec<_> =
            problem.operands().map(|spec| (spec.operand, buffers[spec.operand].slice())).collect();
        prepared.enqueue_operands(&stream, &slices).unwrap();
        for (tensor, exact) in [(Tensor::Dq, &exact.dq), (Tensor::Dk, &exact.dk), (Tensor::Dv, &exact.dv)] {
            let mut bytes = vec![0; buffers[tensor.into()].bytes()];
            buffers[tensor.into()].download(&mut bytes).unwrap();
            let ours = bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32());
            let far = |(x, y): (f32, &f16)| (x - y.to_f32()).abs() > 3e-2 + 4e-3 * y.to_f32().abs();
            assert!(ours.len() == exact.len() && !ours.zip(exact).any(far), "{tensor:?} of {rows} rows");
            assert!(exact.iter().any(|x| x.to_f32().abs() > 0.1), "{tensor:?}");
        }
    }
    assert!(divided[0] > 1 && divided[1] > divided[0] && divided[2] == 1, "{divided:?}");
}

/// A bias that TMA loads. At an address where no tensor map can begin, the same plan reads it from global
/// memory.
fn hopper_bias(gpu: &Gpu, problem: &Problem) {
    let mut problem = problem.clone();
    let (extents, strides) = (vec![1, 2, 70, 70], vec![0, 70 * 72, 72, 1]);
    problem.programs.tables = vec![Table { dtype: ElementType::F16, extents, strides }];
    problem.programs.score = Some(Program::new(&library::bias(0)).unwrap());
    let plan = WgmmaPlan::default_for(&problem, gpu.arch());
    assert_eq!(plan.tables, Tables::Shared);
    let prepared = gpu.prepare(&problem, Some(&Plan::Wgmma(plan))).unwrap();
    let [q, k, v] = [3, 5, 11].map(|step| ramp(2 * 70 * 64, step));
    let bias = ramp(problem.programs.tables[0].span(), 7);
    let operands = Operands::qkv(&q, &k, &v).with(Operand::Table(0), &bias);
    let oracle = oracle::oracle_with(&problem, &operands).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    for shift in [0, 2, 16] {
        let [q, k, v, bias] = [(&q, 0), (&k, 0), (&v, 0), (&bias, shift)].map(|(data, shift)| {
            let mut buffer = Buffer::new(gpu.context(), 2 * data.len() + shift).unwrap();
            buffer.upload(&[vec![0; shift], bytes_of(&data[..]).to_vec()].concat()).unwrap();
            buffer
        });
        let out = Buffer::new(gpu.context(), 2 * 2 * 70 * 64).unwrap();
        let tensors = [&q, &k, &v, &out].map(Buffer::slice);
        let table = bias.slice().part(shift, bias.bytes() - shift).unwrap();
        prepared.enqueue_with(&stream, tensors, None, &[(Operand::Table(0), table)]).unwrap();
        let mut bytes = vec![0; out.bytes()];
        out.download(&mut bytes).unwrap();
        let out: Vec<f16> = bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        close(&out, &oracle.out);
    }
}

fn hopper_plan(gpu: &Gpu, problem: &Problem, plan: &Plan) {
    let problem = &problem.clone().with_lse(true);
    let [q, k, v] = [3, 5, 11].map(|step| ramp(2 * 70 * 64, step));
    let oracle = oracle::oracle(problem, &q, &k, &v).unwrap();
    let nan = vec![0xff; 2 * q.len()];
    let contents = [bytes_of(&q), bytes_of(&k), bytes_of(&v), &nan, &nan[..4 * 2 * 70]];
    let prepared = gpu.prepare(problem, Some(plan)).unwrap();
    assert_eq!(prepared.plan(), plan);
    // Calls on two streams, and a graph of calls launched on the second: each call has its own maps and
    // starts with a zero counter.
    let [first, second] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    let sets = [0, 0, 0, 0, 8].map(|shift| Tensors::new(gpu, contents, shift));
    sets[0].enqueue(&prepared, &first).unwrap();
    sets[1].enqueue(&prepared, &second).unwrap();
    let graph =
        Graph::capture(&first, |stream| sets[2..].iter().try_for_each(|set| set.enqueue(&prepared, stream)));
    graph.unwrap().launch(&second).unwrap();
    for (index, set) in sets.iter().enumerate() {
        let out: Vec<f16> = set.out().chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        close(&out, &oracle.out);
        // The last set lies at an address where no tensor map can begin; the `mma` family computed it.
        assert_eq!(index < 4, set.out() == sets[0].out(), "{index}");
    }
}
