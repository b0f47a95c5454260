//! Eager calls on plain tensors of PyTorch: their arguments are read here once, and the call is made.
//!
//! A method returns `None` for whatever is not such a call or does not fit: then the package's Python code,
//! which serves traces, subclasses, modes and other kinds of tensors, makes the call again, or names in an
//! error what is wrong.

use flashcore::raw::View;
use problem::{ElementType, LengthArray, Operand, Pass, Strides, Tensor};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyCapsule, PyFloat, PyInt, PySlice, PyTuple};

use crate::call::{Call, Place, Terms, code_of, options_of, program, table_code};
use crate::error::Error;
use crate::gradients::{self, Given};
use crate::torch::{Functions, HOST, Seen, Torch, asks, quiet, requires_grad};

mod record;

use record::{Kept, KeptTable};

/// PyTorch's functions, with which eager calls are made.
#[pyclass(frozen)]
pub struct Eager(Torch);

/// The results of a call; `None` if it is for Python code.
pub type Made<'py> = Result<Option<Bound<'py, PyAny>>, Error>;

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
        terms: &Bound<'py, PyTuple>,
        slopes: Option<&Bound<'py, PyAny>>,
        sink: Option<&Bound<'py, PyAny>>,
        chunk: &Bound<'py, PyAny>,
        deterministic: &Bound<'py, PyAny>,
        wants: &Bound<'py, PyTuple>,
    ) -> Made<'py> {
        let wanted = || {
            let mut pending = Pending::new(&self.0, q)?;
            pending.flash_terms(&items(terms)?)?;
            pending.tensors([q, k, v], [Rows::Bshd; 2])?;
            pending.of_heads(slopes, sink, chunk)?;
            pending.deterministic(deterministic)?;
            Some((pending, Wanted::new(&items(wants)?)?))
        };
        let Some((pending, wanted)) = wanted() else { return Ok(None) };
        pending.make([q, k, v], wanted)
    }

    /// `flash_attn_varlen_func`. `arrays` are `cu_seqlens_q`, `cu_seqlens_k`, `seqused_q`, `seqused_k` and
    /// `leftpad_k`.
    #[expect(clippy::too_many_arguments, reason = "the arguments of FlashAttention's function")]
    fn varlen<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        arrays: &Bound<'py, PyTuple>,
        longest: &Bound<'py, PyTuple>,
        terms: &Bound<'py, PyTuple>,
        slopes: Option<&Bound<'py, PyAny>>,
        sink: Option<&Bound<'py, PyAny>>,
        chunk: &Bound<'py, PyAny>,
        deterministic: &Bound<'py, PyAny>,
        wants: &Bound<'py, PyTuple>,
    ) -> Made<'py> {
        let wanted = || {
            let mut pending = Pending::new(&self.0, q)?;
            pending.flash_terms(&items(terms)?)?;
            let (arrays, longest) = (items::<5>(arrays)?, items::<2>(longest)?);
            let rows = [0, 1].map(|side| if arrays[side].is_none() { Rows::Bshd } else { Rows::Packed });
            pending.tensors([q, k, v], rows)?;
            pending.lengths(&arrays, &longest)?;
            pending.of_heads(slopes, sink, chunk)?;
            pending.deterministic(deterministic)?;
            Some((pending, Wanted::new(&items(wants)?)?))
        };
        let Some((pending, wanted)) = wanted() else { return Ok(None) };
        pending.make([q, k, v], wanted)
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
            pending.dropout(dropout)?;
            let (is_causal, gqa) = (flag(is_causal)?, flag(enable_gqa)?);
            quiet(is_causal && mask.is_some())?;
            quiet(asks(q.py(), &self.0.functions.autocast_enabled)?)?;
            if replaces {
                quiet(!asks(q.py(), &self.0.functions.flash_enabled)?)?;
            }
            pending.terms(true, -1, if is_causal { 0 } else { -1 }, scale, 0.0)?;
            let [of_q, of_k, _] = pending.tensors([q, k, v], [Rows::Bhsd; 2])?;
            quiet(of_q.shape[1] != of_k.shape[1] && !gqa)?;
            if let Some(mask) = mask {
                pending.mask(mask, &of_q, &of_k)?;
            }
            Some(pending)
        };
        let Some(pending) = wanted() else { return Ok(None) };
        pending.make([q, k, v], Wanted::Out)
    }

    /// The gradients of q, k and v. `saved` are q, k, v, O and the LSE, and `into` memory for the gradients,
    /// where it is given. `heads` is the dimension of the heads in tensors with one of batch entries. `clear`
    /// sets the gradients to 0 first. `others` are the addresses of the sinks' gradient and of the tables' by
    /// their numbers.
    #[expect(clippy::too_many_arguments, reason = "flat arguments are the cheapest")]
    fn gradients<'py>(
        &self,
        d_out: &Bound<'py, PyAny>,
        d_lse: Option<&Bound<'py, PyAny>>,
        saved: &Bound<'py, PyTuple>,
        into: &Bound<'py, PyTuple>,
        heads: usize,
        terms: Terms,
        deterministic: bool,
        clear: bool,
        features: Option<&Bound<'py, PyTuple>>,
        others: (Option<u64>, Vec<(u8, u64)>),
    ) -> Made<'py> {
        let (Some(saved), Some(into)) = (items(saved), items(into)) else { return Ok(None) };
        let given = Given { d_out, d_lse, saved, into, heads };
        let found = gradients::compute(&self.0, &given, terms, (deterministic, clear), features, others)?;
        Ok(found.map(|found| PyTuple::new(d_out.py(), found)).transpose()?.map(Bound::into_any))
    }

    /// The gradients of the arguments of a recorded call without features: of q, k, v, the sinks and the
    /// call. `call` and `saved` are what autograd keeps of it.
    fn recorded<'py>(
        &self,
        call: &Bound<'py, PyTuple>,
        saved: &Bound<'py, PyTuple>,
        d_out: &Bound<'py, PyAny>,
        d_lse: Option<&Bound<'py, PyAny>>,
        deterministic: bool,
    ) -> Made<'py> {
        let py = d_out.py();
        let none = py.None().into_bound(py);
        let given = || {
            let [heads, terms, features] = items(call)?;
            quiet(!features.is_none() || d_out.is_none() || asks(py, &self.0.functions.grad_enabled)?)?;
            let [q, k, v, out, lse] = items(&saved.get_slice(0, 5))?;
            let into = [&none; 3].map(Bound::clone);
            let heads = usize::try_from(int(&heads)?).ok()?;
            let given = Given { d_out, d_lse, saved: [q, k, v, out, lse], into, heads };
            Some((given, terms.extract::<Terms>().ok()?))
        };
        let Some((given, terms)) = given() else { return Ok(None) };
        let options = (deterministic, false);
        let found = gradients::compute(&self.0, &given, terms, options, None, (None, Vec::new()))?;
        let Some([dq, dk, dv]) = found else { return Ok(None) };
        Ok(Some(PyTuple::new(py, [dq, dk, dv, none.clone(), none])?.into_any()))
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
    /// Whether autograd records calls.
    grad: bool,
    /// Whether it records this one: a tensor requires grad.
    records: bool,
    kept: Kept<'py>,
    device: (i32, i32),
    call: Call,
    terms: Terms,
    /// The storages of the tensors: another thread may give a tensor a new one during the call.
    held: Vec<Bound<'py, PyAny>>,
    order: Rows,
    /// Extents of q, v's rows, and its head dim.
    rows: [usize; 4],
    keys: usize,
    dim_v: usize,
    dtype: ElementType,
}

impl<'a, 'py> Pending<'a, 'py> {
    fn new(torch: &'a Torch, q: &Bound<'py, PyAny>) -> Option<Pending<'a, 'py>> {
        let py = q.py();
        torch.is_quiet(py)?;
        let grad = asks(py, &torch.functions.grad_enabled)?;
        Some(Pending {
            py,
            torch,
            grad,
            records: false,
            kept: Kept::default(),
            device: (0, 0),
            call: Call::default(),
            terms: (false, -1, -1, None, 0.0),
            held: Vec::with_capacity(8),
            order: Rows::Bhsd,
            rows: [0; 4],
            keys: 0,
            dim_v: 0,
            dtype: ElementType::F32,
        })
    }

    /// The probability of dropout. A probability with a state of its own is for Python code.
    fn dropout(&mut self, dropout: &Bound<'_, PyAny>) -> Option<()> {
        let p = float(dropout)?;
        quiet(!(0.0..=1.0).contains(&p))?;
        self.kept.dropout = p;
        Some(())
    }

    /// `dropout_p`, `softmax_scale`, `causal`, `window_size` and `softcap`.
    fn flash_terms(&mut self, [dropout, scale, causal, window, cap]: &[Bound<'py, PyAny>; 5]) -> Option<()> {
        self.dropout(dropout)?;
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
        self.terms = (top_left, before, after, scale, cap);
        self.call.options = options_of(self.terms).ok()?;
        Some(())
    }

    /// Whether autograd needs the gradient of a tensor.
    fn needs(&mut self, tensor: &Bound<'py, PyAny>) -> Option<bool> {
        let needs = self.grad && requires_grad(tensor)?;
        self.records |= needs;
        Some(needs)
    }

    /// An operand besides q, k and v, on their device.
    fn see(&mut self, tensor: &Bound<'py, PyAny>) -> Option<Seen> {
        let seen = self.torch.see(tensor, &mut self.held)?;
        (seen.device == self.device).then_some(seen)
    }

    /// Q, K and V of one type with 16 or 32 bits. `order` is that of the queries and of the keys.
    fn tensors(&mut self, tensors: [&Bound<'py, PyAny>; 3], [of_q, of_kv]: [Rows; 2]) -> Option<[Seen; 3]> {
        let mut see = |tensor: &Bound<'py, PyAny>| self.torch.see(tensor, &mut self.held);
        let all = [see(tensors[0])?, see(tensors[1])?, see(tensors[2])?];
        let Seen { dtype, device, .. } = all[0];
        code_of(dtype)?;
        quiet(all.iter().any(|seen| (seen.dtype, seen.device) != (dtype, device)))?;
        self.device = device;
        for tensor in tensors {
            self.needs(tensor)?;
        }
        let orders = [of_q, of_kv, of_kv];
        for ((tensor, seen), order) in [Tensor::Q, Tensor::K, Tensor::V].into_iter().zip(&all).zip(orders) {
            let (shape, strides) = order.of(seen)?;
            if tensor == Tensor::Q {
                self.rows = shape;
            }
            (self.keys, self.dim_v) = (shape[2], shape[3]);
            self.call.insert(tensor, seen.address, View::rows(dtype, shape, strides));
        }
        (self.order, self.dtype) = (of_q, dtype);
        if of_q != Rows::Packed && of_kv != Rows::Packed {
            quiet(all[0].shape[0] != all[1].shape[0])?;
        }
        Some(all)
    }

    /// Arrays of lengths, and the longest sequences.
    fn lengths(&mut self, arrays: &[Bound<'py, PyAny>; 5], longest: &[Bound<'py, PyAny>; 2]) -> Option<()> {
        for (array, given) in LengthArray::ALL.into_iter().zip(arrays) {
            if given.is_none() {
                continue;
            }
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
        // A sink that is read later may be what requires grad.
        if self.grad && arrays.iter().any(|array| !array.is_none()) {
            self.kept.lengths = Some(arrays.clone());
        }
        for (side, given) in longest.iter().enumerate() {
            self.call.options.longest[side] = match given.is_none() {
                true => None,
                false => Some(usize::try_from(int(given)?).ok().filter(|&n| n < 1 << 31)?),
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
            let wanted = self.needs(slopes)?;
            let kind = (table_code(seen.dtype)?, dims);
            self.kept.table = Some(KeptTable { name: "alibi_slopes", tensor: slopes.clone(), kind, wanted });
            self.kept.score = text;
            let view = View::new(seen.dtype, &seen.shape[..dims], &seen.strides[..dims]).ok()?;
            self.call.insert(Operand::Table(0), seen.address, view);
        }
        let chunk = int(chunk).filter(|chunk| (0..1 << 31).contains(chunk))?;
        if chunk > 0 {
            self.kept.mask = "(q + k_len - q_len) / i0 == k / i0".to_owned();
            self.call.options.mask = program(&self.kept.mask).ok()?;
            self.call.options.ints = vec![chunk as i32];
        }
        if let Some(sink) = sink {
            let seen = self.see(sink)?;
            quiet(seen.dtype != ElementType::F32 || seen.dimensions != 1 || seen.shape[0] != self.rows[1])?;
            quiet(seen.shape[0] > 1 && seen.strides[0] != 1)?;
            let view = View::dense(ElementType::F32, &[seen.shape[0]]).ok()?;
            self.call.insert(Operand::Sinks, seen.address, view);
            self.kept.sink = Some((sink.clone(), self.needs(sink)?));
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
        let wanted = self.needs(mask)?;
        quiet(seen.dimensions < 2)?;
        quiet(!seen.is_bool && seen.dtype != ElementType::F32 && seen.dtype != q.dtype)?;
        let whole = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]];
        let (mut shape, mut strides, mut index) = (Vec::with_capacity(4), Vec::with_capacity(4), Vec::new());
        let (missing, mut kept) = (4 - seen.dimensions, [false; 4]);
        for (i, position) in ["b", "h", "q", "k"].into_iter().enumerate().skip(missing) {
            let (extent, stride) = (seen.shape[i - missing], seen.strides[i - missing]);
            quiet(extent != whole[i] && extent != 1)?;
            // A dimension of one element, or one that repeats, need not be read.
            if extent > 1 && stride != 0 {
                shape.push(extent);
                strides.push(stride);
                index.push(position);
                kept[i - missing] = true;
            }
        }
        if self.records {
            let tensor = self.read_of(mask, &kept[..seen.dimensions])?;
            let kind = (table_code(seen.dtype)?, index.len().max(1));
            self.kept.table = Some(KeptTable { name: "attn_mask", tensor, kind, wanted });
        }
        if index.is_empty() {
            (shape, strides, index) = (vec![1], vec![1], vec!["0"]);
        }
        let index = index.join(", ");
        let text = if seen.is_bool { format!("n0[{index}] != 0") } else { format!("s + t0[{index}]") };
        let (options, program) = (&mut self.call.options, program(&text).ok()?);
        if seen.is_bool {
            (options.mask, self.kept.mask) = (program, text);
        } else {
            (options.score, self.kept.score) = (program, text);
        }
        self.call.insert(Operand::Table(0), seen.address, View::new(seen.dtype, &shape, &strides).ok()?);
        Some(())
    }

    /// A view of the dimensions that are kept, at the first element of the others. Autograd knows the view.
    fn read_of(&self, mask: &Bound<'py, PyAny>, kept: &[bool]) -> Option<Bound<'py, PyAny>> {
        if kept.iter().all(|&kept| kept) {
            return Some(mask.clone());
        }
        let first = 0i64.into_pyobject(self.py).ok()?.into_any();
        let all = PySlice::full(self.py).into_any();
        let index = kept.iter().map(|&kept| if kept { &all } else { &first });
        let read = mask.get_item(PyTuple::new(self.py, index).ok()?).ok()?;
        if kept.contains(&true) { Some(read) } else { read.call_method1("reshape", (1,)).ok() }
    }

    /// Allocates the results, computes them, and has autograd record the call if it must.
    fn make(mut self, tensors: [&Bound<'py, PyAny>; 3], wanted: Wanted) -> Made<'py> {
        let of_mask = self.kept.dropout > 0.0 && wanted == Wanted::OutLseAndNone;
        if of_mask || self.records && self.has_gradients().is_none() {
            return Ok(None);
        }
        let Some((mut out, mut lse, place)) = self.results(tensors[0], wanted) else { return Ok(None) };
        match self.call.run(self.py, place) {
            Ok(()) => {}
            Err(error @ Error::Python(_)) => return Err(error),
            Err(_) => return Ok(None),
        }
        let none = self.py.None().into_bound(self.py);
        if self.records
            && let Some(of_rows) = lse
        {
            let recorded = self.record(tensors, (out, of_rows))?;
            (out, lse) = (recorded.get_item(0)?, Some(recorded.get_item(1)?));
        }
        Ok(Some(match (wanted, lse) {
            (Wanted::OutAndLse, Some(lse)) => PyTuple::new(self.py, [out, lse])?.into_any(),
            (Wanted::OutLseAndNone, Some(lse)) => PyTuple::new(self.py, [out, lse, none])?.into_any(),
            _ => out,
        }))
    }

    /// Draws the state of dropout's generator, as PyTorch's dropout draws.
    fn draw(&mut self, q: &Bound<'py, PyAny>) -> Option<()> {
        if self.kept.dropout > 0.0 {
            let state = self.torch.functions.draw_rng_state.bind(self.py).call1((q,)).ok()?;
            let view = View::dense(ElementType::I32, &[4]).ok()?;
            self.call.insert(Operand::RngState, self.torch.describe(&state)?.address, view);
            self.call.options.dropout = Some(self.kept.dropout as f32);
            self.kept.state = Some(state);
        }
        Some(())
    }

    fn results(&mut self, q: &Bound<'py, PyAny>, wanted: Wanted) -> Option<Results<'py>> {
        let functions = &self.torch.functions;
        let place = self.torch.place(self.py, self.device)?;
        self.call.options.tf32 = self.torch.tf32(self.py, self.device, self.dtype)?;
        let [batch, heads, rows, dim] = self.rows;
        let out = if dim == self.dim_v {
            functions.empty_like.bind(self.py).call1((q,))
        } else {
            quiet(self.order == Rows::Packed)?;
            functions.output_like.bind(self.py).call1((q, self.dim_v))
        };
        let out = out.ok()?;
        // Autograd treats results that are views in another way.
        quiet(self.records && out.call_method0(intern!(self.py, "_is_view")).ok()?.is_truthy().ok()?)?;
        let seen = self.torch.describe(&out)?;
        let (shape, strides) = self.order.of(&seen)?;
        self.call.insert(Tensor::Out, seen.address, View::rows(self.dtype, shape, strides));
        let lse = if wanted == Wanted::Out && !self.records {
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
        self.draw(q)?; // last: Python code would draw again
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

/// The items of a tuple, which takes half as long as the conversion of any sequence to an array.
fn items<'py, const N: usize>(tuple: &Bound<'py, PyTuple>) -> Option<[Bound<'py, PyAny>; N]> {
    tuple.iter().collect::<Vec<_>>().try_into().ok()
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
