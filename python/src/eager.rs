//! Eager calls on plain tensors of PyTorch: their arguments are read here once, and the call is made.
//!
//! A method returns `None` for whatever is not such a call or does not fit: then the package's Python code,
//! which serves traces, subclasses, modes and other kinds of tensors, makes the call again, or names in an
//! error what is wrong.

use flashcore::raw::View;
use problem::{ElementType, LengthArray, Operand, Pass, Strides, Tensor};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyCapsule, PyFloat, PyInt, PyTuple};

use crate::call::{Call, Place, options_of, program};
use crate::error::Error;
use crate::torch::{CUDA, Functions, HOST, Seen, Torch, asks, quiet};

/// PyTorch's functions, with which eager calls are made.
#[pyclass(frozen)]
pub struct Eager(Torch);

type Made<'py> = Result<Option<Bound<'py, PyAny>>, Error>;

/// Memory for O and the LSE, and where they are computed.
type Results<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Place);

#[pymethods]
impl Eager {
    #[new]
    fn new(capsule: &Bound<'_, PyCapsule>, functions: Functions) -> Result<Eager, Error> {
        Ok(Eager(Torch::new(capsule, functions)?))
    }

    /// `flash_attn_func`.
    #[expect(clippy::too_many_arguments, reason = "the arguments of FlashAttention's function")]
    fn flash<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        terms: [Bound<'py, PyAny>; 5],
        slopes: Option<&Bound<'py, PyAny>>,
        sink: Option<&Bound<'py, PyAny>>,
        chunk: &Bound<'py, PyAny>,
        wants: [Bound<'py, PyAny>; 2],
    ) -> Made<'py> {
        let wanted = || {
            let mut pending = Pending::new(&self.0, q)?;
            pending.flash_terms(&terms)?;
            pending.tensors([q, k, v], [Rows::Bshd; 2])?;
            pending.of_heads(slopes, sink, chunk)?;
            Some((pending, Wanted::new(&wants)?))
        };
        let Some((pending, wanted)) = wanted() else { return Ok(None) };
        pending.make(q, wanted)
    }

    /// `flash_attn_varlen_func`. `arrays` are `cu_seqlens_q`, `cu_seqlens_k`, `seqused_q`, `seqused_k` and
    /// `leftpad_k`.
    #[expect(clippy::too_many_arguments, reason = "the arguments of FlashAttention's function")]
    fn varlen<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        arrays: [Option<Bound<'py, PyAny>>; 5],
        longest: [Option<Bound<'py, PyAny>>; 2],
        terms: [Bound<'py, PyAny>; 5],
        slopes: Option<&Bound<'py, PyAny>>,
        sink: Option<&Bound<'py, PyAny>>,
        chunk: &Bound<'py, PyAny>,
        wants: [Bound<'py, PyAny>; 2],
    ) -> Made<'py> {
        let wanted = || {
            let mut pending = Pending::new(&self.0, q)?;
            pending.flash_terms(&terms)?;
            let rows = [0, 1].map(|side| if arrays[side].is_some() { Rows::Packed } else { Rows::Bshd });
            pending.tensors([q, k, v], rows)?;
            pending.lengths(&arrays, &longest)?;
            pending.of_heads(slopes, sink, chunk)?;
            Some((pending, Wanted::new(&wants)?))
        };
        let Some((pending, wanted)) = wanted() else { return Ok(None) };
        pending.make(q, wanted)
    }

    /// `scaled_dot_product_attention`. With `replaces`, the call is one of PyTorch's own function.
    #[expect(clippy::too_many_arguments, reason = "the arguments of PyTorch's function")]
    fn sdpa<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        mask: Option<&Bound<'py, PyAny>>,
        dropout: &Bound<'py, PyAny>,
        is_causal: &Bound<'py, PyAny>,
        scale: Option<&Bound<'py, PyAny>>,
        enable_gqa: &Bound<'py, PyAny>,
        replaces: bool,
    ) -> Made<'py> {
        let wanted = || {
            let mut pending = Pending::new(&self.0, q)?;
            pending.no_dropout(dropout)?;
            let (is_causal, gqa) = (flag(is_causal)?, flag(enable_gqa)?);
            quiet(is_causal && mask.is_some())?;
            quiet(asks(q.py(), &self.0.functions.autocast_enabled)?)?;
            if replaces {
                quiet(!asks(q.py(), &self.0.functions.flash_enabled)?)?;
            }
            pending.terms(true, -1, if is_causal { 0 } else { -1 }, scale, 0.0)?;
            let [q, k, _] = pending.tensors([q, k, v], [Rows::Bhsd; 2])?;
            quiet(q.shape[1] != k.shape[1] && !gqa)?;
            if let Some(mask) = mask {
                pending.mask(mask, &q, &k)?;
            }
            Some(pending)
        };
        let Some(pending) = wanted() else { return Ok(None) };
        pending.make(q, Wanted::Out)
    }
}

/// The results that a caller asks for.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    Out,
    /// `(out, lse)`.
    OutAndLse,
    /// `(out, lse, None)`.
    OutLseAndNone,
}

impl Wanted {
    /// By `return_attn_probs` and `return_lse`.
    fn new([probabilities, lse]: &[Bound<'_, PyAny>; 2]) -> Option<Wanted> {
        Some(match (flag(probabilities)?, flag(lse)?) {
            (true, _) => Wanted::OutLseAndNone,
            (false, true) => Wanted::OutAndLse,
            (false, false) => Wanted::Out,
        })
    }
}

/// The order of a tensor's dimensions: `[batch, head, row, dim]`, `[batch, row, head, dim]` or, without batch
/// entries, `[row, head, dim]`.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    Bhsd,
    Bshd,
    Packed,
}

impl Rows {
    /// The extents and strides in the first of these orders, with contiguous rows.
    fn of(self, seen: &Seen) -> Option<([usize; 4], Strides)> {
        let (n, s) = (seen.shape, seen.strides);
        quiet(seen.dimensions != if self == Rows::Packed { 3 } else { 4 })?;
        let (shape, [batch, head, row, dim]) = match self {
            Rows::Bhsd => (n, s),
            Rows::Bshd => ([n[0], n[2], n[1], n[3]], [s[0], s[2], s[1], s[3]]),
            Rows::Packed => ([1, n[1], n[0], n[2]], [n[0] as i64 * s[0], s[1], s[0], s[2]]),
        };
        (dim == 1 || shape[3] == 1).then_some((shape, Strides { batch, head, row }))
    }
}

/// A call whose arguments are being read.
struct Pending<'a, 'py> {
    py: Python<'py>,
    torch: &'a Torch,
    /// Whether gradients are recorded.
    grad: bool,
    device: (i32, i32),
    call: Call,
    /// The storages of the tensors: another thread may give a tensor a new one during the call.
    held: Vec<Bound<'py, PyAny>>,
    order: Rows,
    /// Extents of q, and v's head dim.
    rows: [usize; 4],
    dim_v: usize,
    dtype: ElementType,
}

impl<'a, 'py> Pending<'a, 'py> {
    fn new(torch: &'a Torch, q: &Bound<'py, PyAny>) -> Option<Pending<'a, 'py>> {
        let py = q.py();
        torch.is_quiet(py)?;
        let grad = asks(py, &torch.functions.grad_enabled)?;
        let (call, held) = (Call::default(), Vec::with_capacity(8));
        let (order, dtype) = (Rows::Bhsd, ElementType::F32);
        Some(Pending { py, torch, grad, device: (0, 0), call, held, order, rows: [0; 4], dim_v: 0, dtype })
    }

    fn no_dropout(&self, dropout: &Bound<'_, PyAny>) -> Option<()> {
        quiet(float(dropout)? != 0.0)
    }

    /// `dropout_p`, `softmax_scale`, `causal`, `window_size` and `softcap`.
    fn flash_terms(&mut self, [dropout, scale, causal, window, cap]: &[Bound<'py, PyAny>; 5]) -> Option<()> {
        self.no_dropout(dropout)?;
        let window = window.cast_exact::<PyTuple>().ok()?;
        quiet(window.len() != 2)?;
        let bound = |side| int(&window.get_item(side).ok()?);
        let after = if flag(causal)? { bound(1).map(|_| 0) } else { bound(1) };
        let scale = (!scale.is_none()).then_some(scale);
        self.terms(false, bound(0)?, after?, scale, float(cap)?)
    }

    fn terms(
        &mut self,
        top_left: bool,
        before: i64,
        after: i64,
        scale: Option<&Bound<'py, PyAny>>,
        cap: f64,
    ) -> Option<()> {
        let scale = match scale {
            None => None,
            Some(scale) => Some(float(scale)? as f32),
        };
        self.call.options = options_of((top_left, before, after, scale, cap)).ok()?;
        Some(())
    }

    /// An operand, on the device of q.
    fn see(&mut self, tensor: &Bound<'py, PyAny>) -> Option<Seen> {
        let seen = self.torch.see(tensor, self.grad, &mut self.held)?;
        (seen.device == self.device).then_some(seen)
    }

    /// Q, K and V of one type with 16 or 32 bits. `order` is that of the queries and of the keys.
    fn tensors(&mut self, [q, k, v]: [&Bound<'py, PyAny>; 3], [of_q, of_kv]: [Rows; 2]) -> Option<[Seen; 3]> {
        let of_query = self.torch.see(q, self.grad, &mut self.held)?;
        self.device = of_query.device;
        let all = [of_query, self.see(k)?, self.see(v)?];
        let dtype = all[0].dtype;
        let known = matches!(dtype, ElementType::F16 | ElementType::Bf16 | ElementType::F32);
        quiet(!known || all.iter().any(|seen| seen.dtype != dtype))?;
        let orders = [of_q, of_kv, of_kv];
        for ((tensor, seen), order) in [Tensor::Q, Tensor::K, Tensor::V].into_iter().zip(&all).zip(orders) {
            let (shape, strides) = order.of(seen)?;
            if tensor == Tensor::Q {
                self.rows = shape;
            }
            self.dim_v = shape[3];
            self.call.insert(tensor, seen.address, View::rows(dtype, shape, strides));
        }
        (self.order, self.dtype) = (of_q, dtype);
        if of_q != Rows::Packed && of_kv != Rows::Packed {
            quiet(all[0].shape[0] != all[1].shape[0])?;
        }
        Some(all)
    }

    /// Arrays of lengths, and the longest sequences.
    fn lengths(
        &mut self,
        arrays: &[Option<Bound<'py, PyAny>>; 5],
        longest: &[Option<Bound<'py, PyAny>>; 2],
    ) -> Option<()> {
        for (array, given) in LengthArray::ALL.into_iter().zip(arrays) {
            let Some(given) = given else { continue };
            // Rows that are not used must be cleared first.
            quiet(array == LengthArray::UsedQ)?;
            let seen = self.see(given)?;
            quiet(
                seen.dtype != ElementType::I32
                    || seen.dimensions != 1
                    || seen.shape[0] > 1 && seen.strides[0] != 1,
            )?;
            let elements = seen.shape[0];
            if array == LengthArray::CumulativeQ && self.device.0 == HOST {
                quiet(!covers(&seen, self.rows[2]))?;
            }
            let view = View::dense(ElementType::I32, &[elements]).ok()?;
            self.call.insert(Operand::Lengths(array), seen.address, view);
        }
        for (side, given) in longest.iter().enumerate() {
            self.call.options.longest[side] = match given {
                None => None,
                Some(given) => Some(usize::try_from(int(given)?).ok().filter(|&n| n < 1 << 31)?),
            };
        }
        Some(())
    }

    /// ALiBi slopes, sinks and chunks.
    fn of_heads(
        &mut self,
        slopes: Option<&Bound<'py, PyAny>>,
        sink: Option<&Bound<'py, PyAny>>,
        chunk: &Bound<'py, PyAny>,
    ) -> Option<()> {
        if let Some(slopes) = slopes {
            let seen = self.see(slopes)?;
            let (heads, one) = (self.rows[1], seen.dimensions == 1);
            quiet(!seen.dtype.is_float() || seen.dtype.bytes() == 1)?;
            // The number of batch entries is known where no sequences are packed.
            let fits = if one { seen.shape[0] == heads } else { self.is_per_entry(&seen) };
            quiet(!fits)?;
            let index = if one { "h" } else { "b, h" };
            let text = format!("s - t0[{index}] * float(abs(q + k_len - q_len - k))");
            self.call.options.score = program(&text).ok()?;
            let dims = seen.dimensions;
            let view = View::new(seen.dtype, &seen.shape[..dims], &seen.strides[..dims]).ok()?;
            self.call.insert(Operand::Table(0), seen.address, view);
        }
        let chunk = int(chunk).filter(|chunk| (0..1 << 31).contains(chunk))?;
        if chunk > 0 {
            self.call.options.mask = program("(q + k_len - q_len) / i0 == k / i0").ok()?;
            self.call.options.ints = vec![chunk as i32];
        }
        if let Some(sink) = sink {
            let seen = self.see(sink)?;
            quiet(seen.dtype != ElementType::F32 || seen.dimensions != 1 || seen.shape[0] != self.rows[1])?;
            quiet(seen.shape[0] > 1 && seen.strides[0] != 1)?;
            let view = View::dense(ElementType::F32, &[seen.shape[0]]).ok()?;
            self.call.insert(Operand::Sinks, seen.address, view);
        }
        Some(())
    }

    fn is_per_entry(&self, seen: &Seen) -> bool {
        let even = self.order != Rows::Packed;
        even && seen.dimensions == 2 && seen.shape[..2] == [self.rows[0], self.rows[1]]
    }

    /// A mask that broadcasts to `[batch, heads, rows, keys]`: truth values, or a bias.
    fn mask(&mut self, mask: &Bound<'py, PyAny>, q: &Seen, k: &Seen) -> Option<()> {
        let seen = self.see(mask)?;
        quiet(seen.dimensions < 2)?;
        quiet(!seen.is_bool && seen.dtype != ElementType::F32 && seen.dtype != q.dtype)?;
        let whole = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]];
        let (mut shape, mut strides, mut index) = (Vec::with_capacity(4), Vec::with_capacity(4), Vec::new());
        let missing = 4 - seen.dimensions;
        for (i, position) in ["b", "h", "q", "k"].into_iter().enumerate().skip(missing) {
            let (extent, stride) = (seen.shape[i - missing], seen.strides[i - missing]);
            quiet(extent != whole[i] && extent != 1)?;
            // A dimension of one element, or one that repeats, need not be read.
            if extent > 1 && stride != 0 {
                shape.push(extent);
                strides.push(stride);
                index.push(position);
            }
        }
        if index.is_empty() {
            (shape, strides, index) = (vec![1], vec![1], vec!["0"]);
        }
        let index = index.join(", ");
        let text = if seen.is_bool { format!("n0[{index}] != 0") } else { format!("s + t0[{index}]") };
        let program = program(&text).ok()?;
        let options = &mut self.call.options;
        *(if seen.is_bool { &mut options.mask } else { &mut options.score }) = program;
        self.call.insert(Operand::Table(0), seen.address, View::new(seen.dtype, &shape, &strides).ok()?);
        Some(())
    }

    /// Allocates the results and computes them.
    fn make(mut self, q: &Bound<'py, PyAny>, wanted: Wanted) -> Made<'py> {
        let Some((out, lse, place)) = self.results(q, wanted) else { return Ok(None) };
        match self.call.run(self.py, place) {
            Ok(()) => {}
            Err(error @ Error::Python(_)) => return Err(error),
            Err(_) => return Ok(None),
        }
        let none = self.py.None().into_bound(self.py);
        Ok(Some(match (wanted, lse) {
            (Wanted::OutAndLse, Some(lse)) => PyTuple::new(self.py, [out, lse])?.into_any(),
            (Wanted::OutLseAndNone, Some(lse)) => PyTuple::new(self.py, [out, lse, none])?.into_any(),
            _ => out,
        }))
    }

    fn results(&mut self, q: &Bound<'py, PyAny>, wanted: Wanted) -> Option<Results<'py>> {
        let functions = &self.torch.functions;
        let ask = |function: &Py<PyAny>| function.bind(self.py).call0().ok();
        let place = match self.device {
            (HOST, _) => (None, ask(&functions.threads)?.extract().ok()?),
            (CUDA, ordinal) => {
                // PyTorch allocates, and captures, on the current device.
                quiet(ask(&functions.current_device)?.extract::<i32>().ok()? != ordinal)?;
                if self.dtype == ElementType::F32 {
                    self.call.options.tf32 = asks(self.py, &functions.allows_tf32)?;
                }
                (Some(ordinal), self.torch.current_stream(ordinal)?)
            }
            _ => return None,
        };
        let [batch, heads, rows, dim] = self.rows;
        let out = if dim == self.dim_v {
            functions.empty_like.bind(self.py).call1((q,))
        } else {
            quiet(self.order == Rows::Packed)?;
            functions.output_like.bind(self.py).call1((q, self.dim_v))
        };
        let out = out.ok()?;
        let seen = self.torch.describe(&out)?;
        let (shape, strides) = self.order.of(&seen)?;
        self.call.insert(Tensor::Out, seen.address, View::rows(self.dtype, shape, strides));
        let lse = if wanted == Wanted::Out {
            None
        } else {
            let shape = if self.order == Rows::Packed { vec![heads, rows] } else { vec![batch, heads, rows] };
            let lse = functions.floats.bind(self.py).call1((q, shape)).ok()?;
            let seen = self.torch.describe(&lse)?;
            let view = View::dense(ElementType::F32, &[batch, heads, rows]).ok()?;
            self.call.insert(Operand::Lse, seen.address, view);
            self.call.options.pass = Pass::forward(true);
            Some(lse)
        };
        self.call.set_rows([batch, heads, rows]);
        Some((out, lse, place))
    }
}

/// Whether each row belongs to a packed sequence of a tensor on the host.
#[expect(unsafe_code, reason = "the first and the last of the elements that PyTorch describes")]
fn covers(starts: &Seen, rows: usize) -> bool {
    let at = |index: usize| {
        // SAFETY: `Torch::see` has compared the elements with the storage, whose memory is held. Lengths are
        // copied and checked before anything depends on them.
        unsafe {
            std::ptr::with_exposed_provenance::<i32>(starts.address as usize).add(index).read_unaligned()
        }
    };
    at(0) == 0 && usize::try_from(at(starts.shape[0] - 1)) == Ok(rows)
}

fn flag(value: &Bound<'_, PyAny>) -> Option<bool> {
    value.cast_exact::<PyBool>().ok().map(|value| value.is_true())
}

fn float(value: &Bound<'_, PyAny>) -> Option<f64> {
    value.cast_exact::<PyFloat>().ok().map(|value| value.value())
}

fn int(value: &Bound<'_, PyAny>) -> Option<i64> {
    value.cast_exact::<PyInt>().ok()?.extract().ok()
}
