//! The decode loop of an inference engine on its own memory: FlashCore gets addresses, strides and a stream.
//! Each step appends a row to caches in pages and attends in one call. On a GPU the step is captured in a
//! graph once, and the graph reads lengths and page tables when it runs. The results are compared with those
//! of dense rows.
//!
//! ```sh
//! cargo run --release -p flashcore --example engine
//! ```
#![allow(unsafe_code, reason = "FlashCore gets addresses")]

use std::error::Error;

use flashcore::gpu::{Buffer, Gpu, Graph, LengthArray, Operand, Stream};
use flashcore::raw::{self, Append, CallOptions, OperandMap, Queue, Tensor, View};
use flashcore::{AttentionError, Band, ElementType, Layout, TensorView, attention};

const SEQUENCES: usize = 2;
const HEADS: usize = 8;
const HEADS_KV: usize = 2;
const DIM: usize = 64;
const PAGE: usize = 16;
/// Pages of a sequence.
const WIDTH: usize = 3;
const STEPS: usize = 40;

/// The engine's arrays, in the order of [`BYTES`].
#[derive(Clone, Copy)]
enum Array {
    Query,
    NewKeys,
    NewValues,
    Keys,
    Values,
    Table,
    Lengths,
    Out,
}

const NEW: usize = SEQUENCES * HEADS_KV * DIM * 4;
const POOL: usize = SEQUENCES * WIDTH * PAGE * HEADS_KV * DIM * 4;
const QUERY: usize = SEQUENCES * HEADS * DIM * 4;
const BYTES: [usize; 8] = [QUERY, NEW, NEW, POOL, POOL, SEQUENCES * WIDTH * 4, SEQUENCES * 4, QUERY];

/// The operands of a step at the arrays' addresses.
fn step(addresses: [u64; 8]) -> Result<(OperandMap<Tensor>, CallOptions, Append), AttentionError> {
    let float = |array: Array, shape: [usize; 4], strides: [usize; 4]| {
        let view = View::new(ElementType::F32, &shape, &strides.map(|stride| stride as i64))?;
        Ok::<_, AttentionError>(Tensor { address: addresses[array as usize], view })
    };
    let ints = |array: Array, shape: &[usize]| {
        let view = View::dense(ElementType::I32, shape)?;
        Ok::<_, AttentionError>(Tensor { address: addresses[array as usize], view })
    };
    // One row per sequence; pages are [row, head, dim].
    let rows = |array, heads| float(array, [SEQUENCES, heads, 1, DIM], [heads * DIM, DIM, DIM, 1]);
    let pool = |array| {
        let width = HEADS_KV * DIM;
        float(array, [SEQUENCES * WIDTH, HEADS_KV, PAGE, DIM], [PAGE * width, DIM, width, 1])
    };
    let operands = [
        (Operand::Q, rows(Array::Query, HEADS)?),
        (Operand::K, pool(Array::Keys)?),
        (Operand::V, pool(Array::Values)?),
        (Operand::OUT, rows(Array::Out, HEADS)?),
        (Operand::PageTable, ints(Array::Table, &[SEQUENCES, WIDTH])?),
        (Operand::Lengths(LengthArray::UsedKv), ints(Array::Lengths, &[SEQUENCES])?),
    ];
    let [keys, values] = [rows(Array::NewKeys, HEADS_KV)?, rows(Array::NewValues, HEADS_KV)?];
    let options = CallOptions { band: Band::CAUSAL, ..CallOptions::default() };
    Ok((operands.into_iter().collect(), options, Append { keys, values, starts: None, rotary: None }))
}

/// Numbers of a step, with a pattern of their own for each seed.
fn numbers(seed: usize, bytes: usize) -> Vec<u8> {
    let number = |i: usize| ((i * 31 + seed * 97) % 61) as f32 / 30.0 - 1.0;
    (0..bytes / 4).flat_map(|i| number(i).to_le_bytes()).collect()
}

/// The arrays that the engine writes before step `t`: the query, the new rows, and the lengths before the
/// append.
fn inputs(t: usize) -> [(Array, Vec<u8>); 4] {
    let lengths = [t as i32; SEQUENCES].into_iter().flat_map(i32::to_le_bytes).collect();
    [
        (Array::Query, numbers(3 * t, QUERY)),
        (Array::NewKeys, numbers(3 * t + 1, NEW)),
        (Array::NewValues, numbers(3 * t + 2, NEW)),
        (Array::Lengths, lengths),
    ]
}

/// Pages in no order.
fn table() -> Vec<u8> {
    let page = |i: usize| (i * 5 + 2) % (SEQUENCES * WIDTH);
    (0..SEQUENCES * WIDTH).flat_map(|i| (page(i) as i32).to_le_bytes()).collect()
}

fn on_host() -> Result<Vec<u8>, AttentionError> {
    // Words, which are aligned for f32 and i32.
    let mut arrays = BYTES.map(|bytes| vec![0u32; bytes / 4]);
    let write = |arrays: &mut [Vec<u32>; 8], array: Array, data: &[u8]| {
        bytemuck::cast_slice_mut(&mut arrays[array as usize]).copy_from_slice(data);
    };
    write(&mut arrays, Array::Table, &table());
    for t in 0..STEPS {
        for (array, data) in inputs(t) {
            write(&mut arrays, array, &data);
        }
        let addresses = arrays.each_mut().map(|array| array.as_mut_ptr().expose_provenance() as u64);
        let (operands, options, append) = step(addresses)?;
        // SAFETY: the addresses are those of arrays of these sizes, which nothing else uses during the call.
        unsafe { raw::prepare_append(Queue::host(), &operands, &options, Some(&append))?.enqueue()? };
    }
    Ok(bytemuck::cast_slice(&arrays[Array::Out as usize]).to_vec())
}

fn on_gpu(gpu: &Gpu) -> Result<Vec<u8>, AttentionError> {
    let stream = Stream::new(gpu.context())?;
    let arrays: Result<Vec<Buffer>, _> =
        BYTES.iter().map(|&bytes| Buffer::zeroed(gpu.context(), bytes)).collect();
    let arrays = arrays?;
    let slice = |array: Array| arrays[array as usize].slice();
    stream.upload(slice(Array::Table), &table())?;
    let mut addresses = [0; 8];
    for (address, array) in addresses.iter_mut().zip(&arrays) {
        *address = array.slice().address();
    }
    let (operands, options, append) = step(addresses)?;
    let queue = Queue::Stream { gpu, handle: stream.raw() };
    let ready = raw::prepare_append(queue, &operands, &options, Some(&append))?; // compiles
    let launch = |_: &Stream| {
        // SAFETY: the addresses are those of buffers of these sizes, which live until the graph has run.
        unsafe { ready.enqueue() }
    };
    let graph = Graph::capture(&stream, launch)?;
    for t in 0..STEPS {
        for (array, data) in inputs(t) {
            stream.upload(slice(array), &data)?;
        }
        graph.launch(&stream)?;
    }
    let mut out = vec![0; QUERY];
    stream.download(slice(Array::Out), &mut out)?;
    stream.synchronize()?;
    Ok(out)
}

/// The last step on dense rows.
fn expected() -> Result<Vec<f32>, AttentionError> {
    let floats = |bytes: Vec<u8>| bytemuck::pod_collect_to_vec::<u8, f32>(&bytes);
    let all = |which: usize| {
        let rows: Vec<Vec<f32>> = (0..STEPS).map(|t| floats(numbers(3 * t + which, NEW))).collect();
        let width = HEADS_KV * DIM;
        let row = |s: usize| rows.iter().flat_map(move |row| row[s * width..][..width].to_vec());
        (0..SEQUENCES).flat_map(row).collect::<Vec<f32>>()
    };
    let (q, k, v) = (floats(numbers(3 * (STEPS - 1), QUERY)), all(1), all(2));
    let keys = |data| TensorView::dense(data, [SEQUENCES, HEADS_KV, STEPS, DIM], Layout::Bshd);
    let queries = TensorView::dense(&q, [SEQUENCES, HEADS, 1, DIM], Layout::Bshd)?;
    Ok(attention(queries, keys(&k)?, keys(&v)?).device(flashcore::Device::Cpu).run()?.data)
}

fn main() -> Result<(), Box<dyn Error>> {
    let expected = expected()?;
    let compare = |device: &str, out: &[u8]| {
        let found = bytemuck::pod_collect_to_vec::<u8, f32>(out);
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{device}: {STEPS} steps, the largest difference from dense rows is {off:.1e}");
        if off < 1e-4 { Ok(()) } else { Err("the results differ") }
    };
    compare("host", &on_host()?)?;
    match Gpu::open(0) {
        Ok(gpu) => compare("GPU, in a graph", &on_gpu(&gpu)?)?,
        Err(error) => println!("no GPU: {error}"),
    }
    Ok(())
}
