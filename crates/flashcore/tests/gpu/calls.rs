//! How many calls of the driver a call on addresses makes that comes again.
#![allow(unsafe_code, reason = "the raw call takes addresses")]

use super::*;
use counts::calls_of;

/// Calls with the same shapes on other addresses and streams. A kernel that needs no memory of its own and no
/// new tensor map is launched by one call of the driver. One with a counter also asks which stream it is.
pub fn calls() {
    let gpu = Gpu::open(0).unwrap();
    let streams = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    let small = (Problem::new(1, 4, 1, 64, DType::F16).with_seq_kv(64, Layout::Bhsd), false);
    let large = (Problem::new(2, 32, 1024, 64, DType::F16), true);
    for (problem, has_counter) in [small, large] {
        let memory = problem.operands().map(|spec| Buffer::new(gpu.context(), 2 * spec.bytes()).unwrap());
        let memory: Vec<Buffer> = memory.collect();
        let operands = |at: usize| -> OperandMap<raw::Tensor> {
            let tensor = |(spec, buffer): (problem::OperandSpec, &Buffer)| {
                let Operand::Tensor(tensor) = spec.operand else { panic!("{}", spec.operand.name()) };
                let address = buffer.slice().address() + (at * spec.bytes()) as u64;
                let view = raw::View::rows(DType::F16, problem.extents(tensor), problem.strides(tensor));
                (spec.operand, raw::Tensor { address, view })
            };
            problem.operands().zip(&memory).map(tensor).collect()
        };
        let options = raw::CallOptions::default();
        // SAFETY: the tensors are in device memory and outlive the launch.
        let call = |at: usize, stream: usize| unsafe {
            let queue = raw::Queue::Stream { gpu: &gpu, handle: streams[stream].raw() };
            raw::prepare(queue, &operands(at), &options).unwrap().enqueue().unwrap();
        };
        let given: Vec<_> =
            operands(0).iter().map(|(operand, tensor)| (Some(operand), tensor.address)).collect();
        let queue = raw::Queue::Stream { gpu: &gpu, handle: 0 };
        let ready = raw::prepare(queue, &operands(0), &options).unwrap();
        assert_eq!(ready.workspace_size() > 0, has_counter, "{:?}", ready.prepared().unwrap().plan());
        let repeated = ready.repeated(&given).unwrap();
        let again = |at: usize, stream: usize| {
            let addresses: Vec<u64> = operands(at).iter().map(|(_, tensor)| tensor.address).collect();
            // SAFETY: as above.
            unsafe { repeated.enqueue(streams[stream].raw(), |index| addresses[index]) }.unwrap();
        };
        // The first calls allocate memory and encode maps.
        [(0, 0), (1, 0), (0, 1), (1, 1)].into_iter().for_each(|(at, stream)| call(at, stream));
        // The capture in progress and the number of the stream; then the launch.
        let expected = if has_counter { 3 } else { 1 };
        for (at, stream) in [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0)] {
            let counted = [calls_of(|| call(at, stream)), calls_of(|| again(at, stream))];
            assert_eq!(counted, [expected; 2], "{problem:?} {at} {stream}");
        }
    }
}
