//! Gradients.

use super::*;

/// Device memory of the operands, `shift` bytes behind the start of a buffer but for the LSE. The tensors are
/// q, k, which is v, too, O and its gradient.
pub fn buffers(
    gpu: &Gpu,
    problem: &Problem,
    ([q, k, out, d_out], lse): ([&[f16]; 4], &[f32]),
    shift: usize,
) -> OperandMap<Buffer> {
    let buffer = |spec: flashcore::OperandSpec| {
        let contents = match spec.operand {
            Operand::Q => bytes_of(q),
            Operand::K | Operand::V => bytes_of(k),
            Operand::OUT => bytes_of(out),
            Operand::Lse => bytes_of(lse),
            Operand::Tensor(Tensor::DOut) => bytes_of(d_out),
            _ => &vec![0xff; spec.bytes()],
        };
        let before = if spec.operand == Operand::Lse { 0 } else { shift };
        let mut buffer = Buffer::new(gpu.context(), before + spec.bytes()).unwrap();
        buffer.upload(&[vec![0; before], contents.to_vec()].concat()).unwrap();
        (spec.operand, buffer)
    };
    problem.operands().map(buffer).collect()
}

/// The gradients of a GPU are those of the CPU: of host slices, and of device memory at any address by both
/// calls that take it. What only the CPU computes is refused where a GPU is named.
#[allow(unsafe_code, reason = "the raw call takes addresses")]
pub fn gradients() {
    let (q, k, d_out) = (ramp(2 * 20 * 16, 3), ramp(30 * 16, 5), ramp(2 * 20 * 16, 11));
    let view = |data, heads, rows| TensorView::dense(data, [1, heads, rows, 16], Layout::Bhsd).unwrap();
    let call = attention(view(&q, 2, 20), view(&k, 1, 30), view(&k, 1, 30)).causal();
    let forward = call.clone().device(Device::Cpu).run().unwrap();
    let backward = |call: flashcore::Attention<'_, f16>| {
        call.backward(view(&forward.data, 2, 20), &forward.lse, view(&d_out, 2, 20))
    };
    let cpu = backward(call.clone().device(Device::Cpu)).unwrap();
    let near = |ours: &[f16], exact: &[f16]| {
        let far = |(x, y): (&f16, &f16)| (x.to_f32() - y.to_f32()).abs() > 2e-2 + 2e-3 * y.to_f32().abs();
        assert!(ours.len() == exact.len() && !ours.iter().zip(exact).any(far), "{ours:?} {exact:?}");
        assert!(exact.iter().any(|x| x.to_f32().abs() > 0.1));
    };
    let gpu = backward(call.clone()).unwrap();
    for (ours, exact) in [(&gpu.dq, &cpu.dq), (&gpu.dk, &cpu.dk), (&gpu.dv, &cpu.dv)] {
        near(ours, exact);
    }
    let sunk = call.sink(&[0.5, 1.0]);
    let (gpu, cpu) = (backward(sunk.clone()).unwrap(), backward(sunk.device(Device::Cpu)).unwrap());
    near(&gpu.dq, &cpu.dq);
    assert!(gpu.d_sinks.iter().zip(&cpu.d_sinks).all(|(x, y)| (x - y).abs() < 1e-2 && y.abs() > 0.02));
    let wide = |data: &[f16]| data.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (wide_q, wide_k, wide_out) = (wide(&q), wide(&k), wide(&forward.data));
    let wide = |data, heads, rows| TensorView::dense(data, [1, heads, rows, 16], Layout::Bhsd).unwrap();
    let call = attention(wide(&wide_q, 2, 20), wide(&wide_k, 1, 30), wide(&wide_k, 1, 30));
    let call = call.device(Device::Cuda(0));
    let refused = call.backward(wide(&wide_out, 2, 20), &forward.lse, wide(&wide_out, 2, 20)).unwrap_err();
    assert!(refused.to_string().contains("dtype"), "{refused}");

    let device = Gpu::open(0).unwrap();
    let stream = Stream::new(device.context()).unwrap();
    let problem = Problem::new(1, 2, 20, 16, DType::F16).with_band(Band::CAUSAL);
    let problem = Problem { heads_kv: 1, seq_kv: 30, ..problem }.with_layout(Layout::Bhsd);
    let problem = problem.with_pass(flashcore::Pass::DETERMINISTIC);
    for shift in [0, 2] {
        let buffers = buffers(&device, &problem, ([&q, &k, &forward.data, &d_out], &forward.lse), shift);
        let slice = |spec: flashcore::OperandSpec| {
            let whole = buffers[spec.operand].slice();
            (spec.operand, whole.part(whole.bytes() - spec.bytes(), spec.bytes()).unwrap())
        };
        let mut slices: Vec<_> = problem.operands().map(slice).collect();
        let prepared = device.prepare(&problem, None).unwrap();
        let check = || {
            for (tensor, exact) in [(Tensor::Dq, &gpu.dq), (Tensor::Dk, &gpu.dk), (Tensor::Dv, &gpu.dv)] {
                let mut bytes = vec![0; buffers[tensor.into()].bytes()];
                buffers[tensor.into()].download(&mut bytes).unwrap();
                assert!(bytes[shift..] == *bytes_of(exact), "{tensor:?}");
            }
        };
        prepared.enqueue_operands(&stream, &slices).unwrap();
        check();
        let last = slices.pop().unwrap();
        let missing = prepared.enqueue_operands(&stream, &slices).unwrap_err().to_string();
        assert_eq!(missing, "lse is missing: the problem has it");
        slices.extend([last, last]);
        let twice = prepared.enqueue_operands(&stream, &slices).unwrap_err().to_string();
        assert_eq!(twice, "lse is given twice; expected each operand once");

        let operand = |spec: flashcore::OperandSpec| {
            let view = match spec.operand {
                Operand::Tensor(tensor) => {
                    raw::View::rows(spec.dtype, problem.extents(tensor), problem.strides(tensor))
                }
                _ => raw::View::dense(spec.dtype, &[spec.elements]).unwrap(),
            };
            (spec.operand, raw::Tensor { address: slice(spec).1.address(), view })
        };
        let operands = problem.operands().map(operand).collect();
        let (pass, band) = (problem.pass, problem.band);
        let options = raw::CallOptions { pass, band, ..raw::CallOptions::default() };
        let queue = raw::Queue::Stream { gpu: &device, handle: stream.raw() };
        let ready = raw::prepare(queue, &operands, &options).unwrap();
        assert!(ready.workspace_size() > 0); // D of each row
        // SAFETY: the tensors are in device memory and outlive the launch.
        unsafe { ready.enqueue() }.unwrap();
        check();
    }
}
