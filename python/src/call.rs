//! A call as the package describes it: numbers and texts, which become the operands and the options of
//! [`flashcore::raw`].
#![allow(unsafe_code, reason = "addresses and streams that Python hands over")]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use cpu::Executor;
use flashcore::gpu::Gpu;
use flashcore::raw::{self, CallOptions, OperandMap, Queue, View};
use problem::{
    Band, Corner, DType, ElementType, Gradients, LengthArray, Operand, Pass, ProblemError, Program, Score,
    Tensor, UnknownInvariant,
};
use pyo3::prelude::*;

use crate::error::Error;
use crate::host::Threads;
use crate::interrupt::Interruptible;

type Four<T> = (T, T, T, T);

/// A tensor in its own order of dimensions: address, shape, strides in elements.
pub type Handed = (u64, Four<usize>, Four<i64>);

/// What changes the answer besides the tensors: whether the band is aligned to the top left, the keys that a
/// query sees before and after the one level with it (−1: all), the factor on Q Kᵀ, and the cap on the logits
/// (0: none).
pub type Terms = (bool, i64, i64, Option<f32>, f64);

/// The ordinal of a GPU and the handle of a stream; or `None` for the host, and the number of PyTorch's
/// threads that may compute (0: this library's own threads).
pub type Place = (Option<i32>, u64);

/// Batch entries, the longest sequence of queries and of keys, and the addresses of `cu_seqlens_q`,
/// `cu_seqlens_k`, `seqused_q`, `seqused_k` and `leftpad_k`, each of 32-bit integers.
type DescribedLengths = (usize, usize, usize, [Option<u64>; 5]);

/// Address, index of the type in [`TYPES`], extents and strides in elements.
pub type DescribedTable = (u64, u8, Vec<usize>, Vec<i64>);

/// Address, strides of batch entries, KV heads and blocks of rows in elements, and the rows of a block (0:
/// one factor per KV head).
type DescribedScales = (u64, [i64; 3], u32);

/// Address of the page table, batch entries, and entries of the table for each of them.
type DescribedPages = (u64, usize, usize);

/// Lengths, the names and addresses of the operands with a value per query head, the texts of the score and
/// of the mask program (empty: none), the values of float and integer parameters, the tables, the descale
/// factors of Q, K and V, the page table, the addresses of O and the LSE from which the call continues, the
/// probability of dropout with the address of the generator's state, and the name of the invariant (empty:
/// none).
pub type DescribedFeatures = (
    Option<DescribedLengths>,
    Vec<(String, u64)>,
    String,
    String,
    Vec<f32>,
    Vec<i32>,
    Vec<DescribedTable>,
    [Option<DescribedScales>; 3],
    Option<DescribedPages>,
    Option<(u64, u64)>,
    Option<(f64, u64)>,
    String,
);

/// Addresses and row strides of cosines and sines, the index of their type in [`TYPES`], their rows and
/// columns, whether pairs are interleaved, and the address of `rotary_seqlens`.
type DescribedRotary = ([(u64, i64); 2], u8, [usize; 2], bool, Option<u64>);

/// New keys and values, the address of `cu_seqlens_k_new`, and the rotary embedding.
pub type DescribedAppend = (Handed, Handed, Option<u64>, Option<DescribedRotary>);

/// Operands that only a backward pass has, and its options: whether each run must return
/// equal bits, dO, the address of the gradient of the LSE, dQ, dK and dV, the address of the gradient of the
/// sinks, and numbers of tables with the addresses of their gradients.
pub type DescribedGradients =
    (bool, (u64, Four<i64>), Option<u64>, [(u64, Four<i64>); 3], Option<u64>, Vec<(u8, u64)>);

/// The element types of tables, in the order of their codes.
const TYPES: [ElementType; 5] =
    [ElementType::F32, ElementType::F16, ElementType::Bf16, ElementType::I32, ElementType::U8];

/// The type of a table with a code.
pub fn table_type(code: u8) -> Result<ElementType, Error> {
    let unknown = || Error::invalid("the type of a table", &code.to_string(), "0 (f32) to 4 (u8)");
    TYPES.get(usize::from(code)).copied().ok_or_else(unknown)
}

/// The code of the type of a table.
pub fn table_code(dtype: ElementType) -> Option<u8> {
    (0..).zip(TYPES).find_map(|(code, each)| (each == dtype).then_some(code))
}

/// Computes attention of 4-D tensors: in host memory before it returns, or enqueued on a stream. The axis
/// `heads` of the tensors is 1 or 2, and the sequence is the other one of the two. `out` has q's shape, with
/// v's head dim. `lse` is the address of `batch * heads_q * seq_q` floats. With `gradients`, it is the
/// backward pass, which reads `out` and `lse`. The first call for a problem on a GPU compiles a kernel.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, out, lse, heads, dtypes, terms, place, features=None, append=None, gradients=None
))]
#[expect(clippy::too_many_arguments, reason = "Python's calling convention: flat arguments are the cheapest")]
pub fn attend(
    py: Python<'_>,
    q: Handed,
    k: Handed,
    v: Handed,
    out: (u64, Four<i64>),
    lse: Option<u64>,
    heads: usize,
    dtypes: u32,
    terms: Terms,
    place: Place,
    features: Option<DescribedFeatures>,
    append: Option<DescribedAppend>,
    gradients: Option<DescribedGradients>,
) -> Result<(), Error> {
    let mut call = Call::new([&q, &k, &v], out, heads, dtypes, terms)?;
    if let Some(features) = features {
        call.add(features)?;
    }
    if let Some(append) = append {
        call.append = Some(call.appended(append, heads, types_of(dtypes)?.0)?);
    }
    if let Some(address) = lse {
        call.add_lse(address)?;
    }
    if let Some(gradients) = gradients {
        call.add_gradients(heads, gradients)?;
    }
    call.run(py, place)
}

/// Operands and options.
#[derive(Debug, Default)]
pub struct Call {
    pub operands: OperandMap<raw::Tensor>,
    pub options: CallOptions,
    append: Option<raw::Append>,
    /// Extents of Q: batch entries, heads and rows.
    rows: [usize; 3],
    /// Heads and rows of K.
    keys: [usize; 2],
    /// Batch entries, if lengths state their number; else 0.
    batch: usize,
}

impl Call {
    /// The forward pass of tensors.
    pub fn new(
        [q, k, v]: [&Handed; 3],
        (out, out_strides): (u64, Four<i64>),
        heads: usize,
        dtypes: u32,
        terms: Terms,
    ) -> Result<Call, Error> {
        let mut call = Call { options: options_of(terms)?, ..Call::default() };
        let (types, tf32) = types_of(dtypes)?;
        call.options.tf32 = tf32;
        let out = (out, (q.1.0, q.1.1, q.1.2, v.1.3), out_strides);
        for (tensor, (handed, dtype)) in
            Tensor::FORWARD.into_iter().zip([q, k, v, &out].into_iter().zip(types))
        {
            let (shape, strides) = ordered(heads, handed.1, handed.2);
            match tensor {
                Tensor::Q => call.rows = [shape[0], shape[1], shape[2]],
                Tensor::K => call.keys = [shape[1], shape[2]],
                _ => {}
            }
            call.insert(tensor, handed.0, View::new(dtype.into(), &shape, &strides)?);
        }
        Ok(call)
    }

    /// The keys and values that the call appends to its cache.
    fn appended(
        &self,
        (k, v, starts, rotary): DescribedAppend,
        heads: usize,
        [of_q, of_k, of_v, _]: [DType; 4],
    ) -> Result<raw::Append, Error> {
        let batch = match self.operands.get(Operand::PageTable) {
            Some(table) => table.view.shape()[0],
            None => self.batch,
        };
        let integers = |address: u64, len: usize| -> Result<raw::Tensor, Error> {
            Ok(raw::Tensor { address, view: View::dense(ElementType::I32, &[len])? })
        };
        let rows = |handed: &Handed, dtype: DType| -> Result<raw::Tensor, Error> {
            let (shape, strides) = ordered(heads, handed.1, handed.2);
            Ok(raw::Tensor { address: handed.0, view: View::new(dtype.into(), &shape, &strides)? })
        };
        let rotary = rotary.map(|(tables, code, shape, interleaved, positions)| {
            let table = |(address, stride): (u64, i64)| -> Result<raw::Tensor, Error> {
                Ok(raw::Tensor { address, view: View::new(table_type(code)?, &shape, &[stride, 1])? })
            };
            let positions = positions.map(|address| integers(address, batch)).transpose()?;
            let [cos, sin] = tables;
            Ok::<_, Error>(raw::Rotary { cos: table(cos)?, sin: table(sin)?, interleaved, positions })
        });
        Ok(raw::Append {
            // Rows that are rounded to an 8-bit cache have q's type.
            keys: rows(&k, if of_k.is_fp8() { of_q } else { of_k })?,
            values: rows(&v, if of_v.is_fp8() { of_q } else { of_v })?,
            starts: starts.map(|address| integers(address, batch + 1)).transpose()?,
            rotary: rotary.transpose()?,
        })
    }

    pub fn insert(&mut self, operand: impl Into<Operand>, address: u64, view: View) {
        self.operands.insert(operand.into(), raw::Tensor { address, view });
    }

    fn insert_dense(
        &mut self,
        operand: Operand,
        address: u64,
        dtype: ElementType,
        shape: &[usize],
    ) -> Result<(), Error> {
        self.insert(operand, address, View::dense(dtype, shape)?);
        Ok(())
    }

    /// States the extents of Q: batch entries, heads and rows.
    pub fn set_rows(&mut self, rows: [usize; 3]) {
        self.rows = rows;
    }

    /// Has the call return the log-sum-exp.
    pub fn add_lse(&mut self, address: u64) -> Result<(), Error> {
        let (continues, invariant) = (self.options.pass.continues(), self.options.pass.invariant());
        self.options.pass = Pass::Forward { lse: true, continues, invariant };
        self.insert_dense(Operand::Lse, address, ElementType::F32, &self.rows.clone())
    }

    /// Makes the call the backward pass. Gradients have the shapes and types of their tensors.
    pub fn add_gradients(&mut self, heads: usize, gradients: DescribedGradients) -> Result<(), Error> {
        let (deterministic, d_out, d_lse, tensors, d_sinks, d_tables) = gradients;
        let [dq, dk, dv] = tensors;
        for (gradient, of, (address, strides)) in [
            (Tensor::DOut, Tensor::Out, d_out),
            (Tensor::Dq, Tensor::Q, dq),
            (Tensor::Dk, Tensor::K, dk),
            (Tensor::Dv, Tensor::V, dv),
        ] {
            let view = self.operands[of.into()].view;
            let (_, strides) = ordered(heads, (0, 0, 0, 0), strides);
            self.insert(gradient, address, View::new(view.dtype(), view.shape(), &strides)?);
        }
        if let Some(address) = d_lse {
            self.insert_dense(Operand::DLse, address, ElementType::F32, &self.rows.clone())?;
        }
        let mut wants = Gradients { sinks: d_sinks.is_some(), tables: 0 };
        if let Some(address) = d_sinks {
            self.insert_dense(Operand::DSinks, address, ElementType::F32, &[self.rows[1]])?;
        }
        for (table, address) in d_tables {
            let view = self.operands.get(Operand::Table(table)).map(|table| table.view);
            let none = || Error::invalid("the number of a table", &table.to_string(), "one of the call's");
            let view = view.ok_or_else(none)?;
            let extents: Vec<usize> = { view.shape().iter().zip(view.strides()) }
                .map(|(&extent, &stride)| if stride == 0 { extent.min(1) } else { extent })
                .collect();
            wants.tables |= 1 << table; // tables are numbered up to 7, or the problem is refused
            self.insert_dense(Operand::DTable(table), address, ElementType::F32, &extents)?;
        }
        self.options.pass = Pass::Backward { deterministic, d_lse: d_lse.is_some(), wants };
        Ok(())
    }

    pub fn add(&mut self, features: DescribedFeatures) -> Result<(), Error> {
        let (lengths, of_heads, score, mask, floats, ints, tables, scales, pages, before, dropout, invariant) =
            features;
        let [mut batch, heads, mut rows] = self.rows;
        let [heads_kv, mut keys] = self.keys;
        if let Some((entries, longest_q, longest_kv, arrays)) = lengths {
            batch = entries;
            self.batch = entries;
            for (array, address) in LengthArray::ALL.into_iter().zip(arrays) {
                let cumulative = matches!(array, LengthArray::CumulativeQ | LengthArray::CumulativeKv);
                let elements = batch + usize::from(cumulative);
                if let Some(address) = address {
                    self.insert_dense(Operand::Lengths(array), address, ElementType::I32, &[elements])?;
                }
            }
            rows = if arrays[0].is_some() { longest_q.max(1) } else { rows };
            keys = if arrays[1].is_some() || pages.is_some() { longest_kv } else { keys };
            self.options.longest = [Some(rows), Some(keys)];
        }
        if let Some((address, sequences, entries)) = pages {
            self.insert_dense(Operand::PageTable, address, ElementType::I32, &[sequences, entries])?;
        }
        for (name, address) in of_heads {
            let operand = Score::OPERANDS.into_iter().find(|operand| operand.name() == name);
            let names = Score::OPERANDS.map(Operand::name).join(", ");
            let unknown = || Error::invalid("an operand of heads", &name, &names);
            self.insert_dense(operand.ok_or_else(unknown)?, address, ElementType::F32, &[heads])?;
        }
        for (i, (address, code, extents, strides)) in (0..=u8::MAX).zip(tables) {
            self.insert(Operand::Table(i), address, View::new(table_type(code)?, &extents, &strides)?);
        }
        for (i, (tensor, rows)) in
            [(Tensor::Q, rows), (Tensor::K, keys), (Tensor::V, keys)].into_iter().enumerate()
        {
            let Some((address, strides, block)) = scales[i] else { continue };
            let blocks = rows.checked_div(block as usize).map(|_| rows.div_ceil(block as usize));
            let shape = [batch, heads_kv, blocks.unwrap_or(1)];
            let dims = 2 + usize::from(blocks.is_some());
            let view = View::new(ElementType::F32, &shape[..dims], &strides[..dims])?;
            self.insert(Operand::Descale(tensor), address, view);
            self.options.scale_rows[i] = block;
        }
        let refuse = |UnknownInvariant(name)| Error::invalid("invariant", &name, "batch or phase");
        let invariant = (!invariant.is_empty()).then(|| invariant.parse().map_err(refuse)).transpose()?;
        self.options.pass = Pass::Forward { lse: false, continues: before.is_some(), invariant };
        if let Some((out, lse)) = before {
            self.insert(Operand::OutBefore, out, self.operands[Operand::OUT].view);
            self.insert_dense(Operand::LseBefore, lse, ElementType::F32, &self.rows.clone())?;
        }
        if let Some((p, state)) = dropout {
            self.options.dropout = Some(p as f32);
            self.insert_dense(Operand::RngState, state, ElementType::I32, &[4])?;
        }
        (self.options.score, self.options.mask) = (program(&score)?, program(&mask)?);
        (self.options.floats, self.options.ints) = (floats, ints);
        Ok(())
    }

    /// Computes, or enqueues. Other Python threads run meanwhile: a launch blocks while the stream's queue is
    /// full, and a Python callback in that queue needs the interpreter. A plan for the host is chosen with
    /// the interpreter held, so that no other thread can fork meanwhile and leave a lock to its child.
    pub fn run(&self, py: Python<'_>, place: Place) -> Result<(), Error> {
        let Call { operands, options, append, .. } = self;
        // A call without rows needs no device, and writes nothing.
        let (ordinal, handle) = if self.rows.contains(&0) { (None, 0) } else { place };
        let Some(ordinal) = ordinal else {
            let workers = Workers::new(handle);
            let executor = Interruptible::new(&workers);
            let queue = Queue::Host { executor: Some(&executor), threads: workers.threads() };
            let ready = raw::prepare_append(queue, operands, options, append.as_ref())?;
            // SAFETY: the package describes tensors whose storage it has measured and keeps alive during the
            // call, and it has just allocated the outputs. Writing to an input from another Python thread
            // meanwhile is a race of the caller's, as with any NumPy function.
            let done = py.detach(|| unsafe { ready.enqueue() });
            return executor.exception().map_or_else(|| Ok(done?), |exception| Err(exception.into()));
        };
        py.detach(|| {
            let gpu = Gpu::open(ordinal)?;
            let ready =
                raw::prepare_append(Queue::Stream { gpu: &gpu, handle }, operands, options, append.as_ref())?;
            // SAFETY: as above. PyTorch's allocator orders a later reuse of the memory on the stream, which
            // is PyTorch's current one on the device: PyTorch never destroys that.
            unsafe { ready.enqueue() }?;
            Ok(())
        })
    }
}

/// Extents and strides in the order batch, head, row, dim.
fn ordered(heads: usize, shape: Four<usize>, strides: Four<i64>) -> ([usize; 4], [i64; 4]) {
    let ((batch, x, y, dim), (of_batch, of_x, of_y, of_dim)) = (shape, strides);
    match heads {
        1 => ([batch, x, y, dim], [of_batch, of_x, of_y, of_dim]),
        _ => ([batch, y, x, dim], [of_batch, of_y, of_x, of_dim]),
    }
}

/// The threads of a call, chosen when work for more than one comes.
pub struct Workers {
    of_torch: Option<usize>,
    made: OnceLock<Threads>,
}

impl Workers {
    /// The threads of a [`Place`] on the host.
    pub fn new(threads: u64) -> Workers {
        let of_torch = usize::try_from(threads).ok().filter(|&threads| threads > 0);
        Workers { of_torch, made: OnceLock::new() }
    }
}

impl Executor for Workers {
    fn threads(&self) -> usize {
        self.of_torch.unwrap_or_else(cpu::threads)
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        if threads <= 1 {
            return work();
        }
        let make = || Python::attach(|py| Threads::new(py, threads, self.of_torch));
        self.made.get_or_init(make).executor().run(threads, work);
    }
}

/// The element types of a code, and whether products are made in tf32: four bits for each of q, k, v and out,
/// the lowest for q, with the place of the type in [`DType::ALL`]; then a bit for tf32. An integer is the
/// cheapest argument that Python can look up and pass.
pub fn types_of(code: u32) -> Result<([DType; 4], bool), Error> {
    let of = |tensor: u32| DType::ALL.get((code >> (4 * tensor) & 15) as usize).copied();
    match (of(0), of(1), of(2), of(3), code >> 16) {
        (Some(q), Some(k), Some(v), Some(out), tf32 @ (0 | 1)) => Ok(([q, k, v, out], tf32 == 1)),
        _ => {
            let expected = "four digits from 0 to 4 (f16, bf16, f32, e4m3, e5m2), for q, k, v and out, after \
                            a digit 1 for products in tf32";
            Err(Error::DType(format!("invalid value '{code:#x}' for dtypes: expected {expected}")))
        }
    }
}

/// The code of tensors that all have one type of 16 or 32 bits.
pub fn code_of(dtype: ElementType) -> Option<u32> {
    match dtype {
        ElementType::F16 => Some(0x0000),
        ElementType::Bf16 => Some(0x1111),
        ElementType::F32 => Some(0x2222),
        _ => None,
    }
}

/// The bit of a code for products in tf32.
pub const TF32: u32 = 1 << 16;

/// The options of a call without features.
///
/// # Errors
/// When a bound of the band is not a valid number of keys, or the cap is not positive in f32.
pub fn options_of((top_left, before, after, scale, cap): Terms) -> Result<CallOptions, Error> {
    let corner = if top_left { Corner::TopLeft } else { Corner::BottomRight };
    let band = Band { corner, before: bound("before", before)?, after: bound("after", after)? };
    // A cap that is too small for f32 is not "no cap".
    let softcap = (cap != 0.0).then_some(cap as f32);
    if softcap.is_some_and(|cap| !(cap > 0.0 && cap.is_finite())) {
        return Err(ProblemError::Softcap { value: cap.to_string() }.into());
    }
    Ok(CallOptions { band: band.aligned(corner), scale, softcap, ..CallOptions::default() })
}

fn bound(name: &str, keys: i64) -> Result<Option<u32>, Error> {
    if keys == -1 {
        return Ok(None);
    }
    let expected = || format!("-1 (all keys) to {}", u32::MAX);
    u32::try_from(keys).map(Some).map_err(|_| Error::invalid(name, &keys.to_string(), &expected()))
}

/// Largest number of cached programs. A full cache is emptied.
const MOST: usize = 1024;

/// The program of a text, which is parsed once. `None` for an empty text.
pub fn program(text: &str) -> Result<Option<Program>, Error> {
    static KNOWN: LazyLock<Mutex<HashMap<String, Arc<Program>>>> = LazyLock::new(Mutex::default);
    if text.is_empty() {
        return Ok(None);
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = known.get(text) {
        return Ok(Some(Program::clone(program)));
    }
    let program: Program = text.parse().map_err(|error| Error::Argument(format!("{error}")))?;
    if known.len() >= MOST {
        known.clear();
    }
    known.insert(text.to_owned(), Arc::new(program.clone()));
    Ok(Some(program))
}
