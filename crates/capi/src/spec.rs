//! The text that describes a call to interfaces which pass tensors by position: TVM-FFI and XLA.
//!
//! The text has items between semicolons. The first names the tensors of the call in their order, by the
//! names of `flashcore.h` in lower case: `q k v out lse`. `_` leaves a tensor out. The other items are the
//! fields of `flashcore_call`, such as `scale=0.125`, and flags, such as `causal`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::str::FromStr;

use flashcore::gpu::Operand;
use flashcore::raw::{CallOptions, Described, Interface, Ready, Tensor, View, keep_call, launch_again};
use flashcore::{AttentionError, Band, Corner};

use crate::abi::{self, APPENDED, CallArray};
use crate::arrays::{AttentionCall, CallArrays, CallTarget, pass};
use crate::errors::invalid;

/// A call except for its tensors.
#[derive(Debug, Default)]
pub struct CallSpec {
    /// The array that each tensor is; `None` for one that is not part of the call.
    arrays: Vec<Option<CallArray>>,
    options: CallOptions,
    /// Whether tensors are `[batch, head, row, dim]`, and not `[batch, row, head, dim]`.
    heads_first: bool,
    interleaved: bool,
    writes_slots: bool,
    /// The most threads on the host; 0: all.
    pub threads: usize,
}

/// A tensor as a caller hands it over. Without strides it is dense.
#[derive(Clone, Copy, Debug)]
pub struct HandedTensor<'a> {
    /// `FLASHCORE_F32` or another.
    pub dtype: u32,
    pub address: u64,
    pub shape: &'a [i64],
    pub strides: Option<&'a [i64]>,
}

/// A text, and the tensors that an interface hands over with it.
#[derive(Debug)]
pub struct HandedCall<'a> {
    pub text: &'a [u8],
    /// The call that the text describes.
    pub spec: &'a CallSpec,
    pub place: CallTarget,
    /// In the order of the text.
    pub tensors: &'a [HandedTensor<'a>],
}

/// Tensors of a call that need no heap memory.
pub const MANY: usize = 12;

/// The most texts that a thread remembers. A model has a few for each kind of layer.
const REMEMBERED: usize = 256;
/// The most dimensions of a tensor that is handed over.
const MOST: usize = 8;

const ITEMS: &str = "causal, top_left, backward, deterministic, tf32, interleaved, heads_first, \
    write_slots,     keys_before=, keys_after=, scale=, softcap=, score=, mask=, floats=, ints=, longest_q=, longest_k=, \
    scale_rows= or threads=";

/// The call that a text describes. A thread parses a text once.
pub fn parsed(text: &[u8]) -> Result<Rc<CallSpec>, AttentionError> {
    thread_local! {
        static PARSED: RefCell<HashMap<Box<[u8]>, Rc<CallSpec>>> = RefCell::default();
    }
    if let Some(known) = PARSED.with_borrow(|all| all.get(text).cloned()) {
        return Ok(known);
    }
    let words = std::str::from_utf8(text)
        .map_err(|error| invalid("the first argument", "text", error.to_string(), "UTF-8"))?;
    let spec = Rc::new(words.parse::<CallSpec>()?);
    PARSED.with_borrow_mut(|all| {
        if all.len() == REMEMBERED {
            all.clear();
        }
        all.insert(text.into(), Rc::clone(&spec));
    });
    Ok(spec)
}

impl FromStr for CallSpec {
    type Err = AttentionError;

    fn from_str(text: &str) -> Result<CallSpec, AttentionError> {
        let mut items = text.split(';').map(str::trim);
        let mut spec = CallSpec::default();
        for name in items.next().unwrap_or_default().split_whitespace() {
            spec.arrays.push(if name == "_" { None } else { Some(array(name)?) });
        }
        let (mut backward, mut deterministic, mut corner) = (false, false, Corner::BottomRight);
        let mut band = Band::FULL;
        for item in items.filter(|item| !item.is_empty()) {
            match item {
                "causal" => band.after = Some(0),
                "top_left" => corner = Corner::TopLeft,
                "backward" => backward = true,
                "deterministic" => deterministic = true,
                "tf32" => spec.options.tf32 = true,
                "interleaved" => spec.interleaved = true,
                "write_slots" => spec.writes_slots = true,
                "heads_first" => spec.heads_first = true,
                _ => spec.set(&mut band, item)?,
            }
        }
        spec.options.band = band.aligned(corner);
        let has = |operand| spec.arrays.contains(&Some(CallArray::Pass(operand)));
        spec.options.pass = pass(backward, deterministic, has);
        Ok(spec)
    }
}

impl CallSpec {
    /// Sets a field that has a value.
    fn set(&mut self, band: &mut Band, item: &str) -> Result<(), AttentionError> {
        let unknown = || invalid("the call's text", "item", item, ITEMS);
        let (name, value) = item.split_once('=').ok_or_else(unknown)?;
        let value = value.trim();
        let options = &mut self.options;
        let program = |what| {
            let parsed = value.parse().map_err(|error| AttentionError::Program { what, error })?;
            Ok::<_, AttentionError>(Some(parsed))
        };
        match name.trim() {
            "keys_before" => band.before = Some(number("item 'keys_before'", value)?),
            "keys_after" => band.after = Some(number("item 'keys_after'", value)?),
            "scale" => options.scale = Some(number("item 'scale'", value)?),
            "softcap" => options.softcap = Some(number("item 'softcap'", value)?),
            "score" => options.score = program("score")?,
            "mask" => options.mask = program("mask")?,
            "floats" => options.floats = numbers("item 'floats'", value)?,
            "ints" => options.ints = numbers("item 'ints'", value)?,
            "longest_q" => options.longest[0] = Some(number("item 'longest_q'", value)?),
            "longest_k" => options.longest[1] = Some(number("item 'longest_k'", value)?),
            "scale_rows" => {
                let rows: Vec<u32> = numbers("item 'scale_rows'", value)?;
                let three = || invalid("the call's text", "item 'scale_rows'", value, "three numbers");
                options.scale_rows = rows.try_into().map_err(|_| three())?;
            }
            "threads" => self.threads = number("item 'threads'", value)?,
            _ => return Err(unknown()),
        }
        Ok(())
    }

    /// The call on tensors in the order of the text.
    fn call(
        &self,
        place: CallTarget,
        tensors: &[HandedTensor<'_>],
    ) -> Result<AttentionCall<'_>, AttentionError> {
        if tensors.len() != self.arrays.len() {
            let expected = format!("{}, as the call's text names", self.arrays.len());
            return Err(invalid("the tensors", "number", tensors.len(), expected));
        }
        let mut arrays = CallArrays::default();
        for (array, tensor) in self.arrays.iter().zip(tensors) {
            match *array {
                Some(CallArray::Slots) => {
                    arrays.insert_slots(tensor.address, tensor.dtype, tensor.shape, tensor.strides)?;
                }
                Some(array) => {
                    let view = self.view(array, tensor)?;
                    arrays.insert(array, Tensor { address: tensor.address, view })?;
                }
                None => {}
            }
        }
        let &CallSpec { ref options, interleaved, writes_slots, .. } = self;
        Ok(AttentionCall { place, arrays, options, interleaved, writes_slots })
    }

    /// Which operand of the pass each tensor is.
    pub fn operands(&self) -> impl Iterator<Item = Option<Operand>> {
        self.arrays.iter().map(|array| array.and_then(CallArray::operand))
    }

    /// The names of the tensors.
    pub fn name(&self, index: usize) -> &'static str {
        self.arrays.get(index).copied().flatten().map_or("a tensor", CallArray::name)
    }

    /// A tensor in the order batch, head, row, dim. Leading dimensions in excess are part of the batch, and a
    /// tensor of three dimensions has no batch.
    fn view(&self, array: CallArray, tensor: &HandedTensor<'_>) -> Result<View, AttentionError> {
        let dtype = abi::element_type(array.name(), tensor.dtype)?;
        let rank = tensor.shape.len();
        let dimensions = || invalid(array.name(), "number of dimensions", rank, format!("at most {MOST}"));
        if rank > MOST {
            return Err(dimensions());
        }
        let (mut shape, mut strides) = ([1usize; MOST], [0i64; MOST]);
        let mut next = 1i64;
        for i in (0..rank).rev() {
            let given = tensor.shape[i];
            let expected = "0 or more in each dimension";
            shape[i] = usize::try_from(given).map_err(|_| invalid(array.name(), "shape", given, expected))?;
            strides[i] = tensor.strides.map_or(next, |strides| strides[i]);
            next = next.saturating_mul(given.max(1));
        }
        let is_lse = matches!(array, CallArray::Pass(Operand::Lse | Operand::DLse));
        let keep = if is_lse { 3 } else { 4 };
        let mut first = 0;
        while (array.has_rows() || is_lse) && rank - first > keep {
            fold(array.name(), &mut shape[first..], &mut strides[first..])?;
            first += 1;
        }
        let (mut shape, mut strides) = (&mut shape[first..rank], &mut strides[first..rank]);
        let (mut with_batch, mut its_strides) = ([1; 4], [0; 4]);
        if array.has_rows() && shape.len() == 3 {
            with_batch[1..].copy_from_slice(shape);
            its_strides[1..].copy_from_slice(strides);
            (shape, strides) = (&mut with_batch, &mut its_strides);
        }
        if array.has_rows() && shape.len() == 4 && !self.heads_first {
            shape.swap(1, 2);
            strides.swap(1, 2);
        }
        View::new(dtype, shape, strides)
    }
}

impl HandedCall<'_> {
    /// Prepares the call and passes it on.
    pub fn with_ready(
        &self,
        then: impl FnOnce(&Ready<'_>) -> Result<(), AttentionError>,
    ) -> Result<(), AttentionError> {
        self.spec.call(self.place, self.tensors)?.with_ready(then)
    }

    /// Enqueues the call on its stream, or computes it in host memory.
    ///
    /// # Safety
    /// The tensors are as [`Ready::enqueue`] demands.
    pub unsafe fn run(&self) -> Result<(), AttentionError> {
        let CallTarget::Stream { handle, .. } = self.place else {
            // SAFETY: this function's own contract.
            return self.with_ready(|ready| unsafe { ready.enqueue() });
        };
        // SAFETY: as above.
        if let Some(launched) = unsafe { launch_again(self, handle) } {
            return launched;
        }
        self.with_ready(|ready| {
            // SAFETY: as above.
            unsafe { ready.enqueue()? };
            keep_call(self, self.spec.operands(), ready);
            Ok(())
        })
    }
}

/// Hands over the words of a text for calls on the GPU of this number ([`Described::words`]).
#[inline]
pub fn words_of(text: &[u8], ordinal: u64, mut next: impl FnMut(&[u64]) -> bool) -> bool {
    let (words, rest) = text.as_chunks();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    next(&[text.len() as u64, ordinal, u64::from_ne_bytes(last)])
        && words.iter().all(|&bytes| next(&[u64::from_ne_bytes(bytes)]))
}

impl Described for HandedCall<'_> {
    fn interface(&self) -> Interface {
        Interface::TvmFfi
    }

    fn words(&self, mut next: impl FnMut(&[u64]) -> bool) -> bool {
        let ordinal = match self.place {
            CallTarget::Stream { ordinal, .. } => ordinal as u64,
            CallTarget::Host(_) => u64::MAX,
        };
        words_of(self.text, ordinal, &mut next)
            && self.tensors.iter().all(|tensor| {
                let (shape, strides) = (tensor.shape, tensor.strides.unwrap_or_default());
                let has_strides = u64::from(tensor.strides.is_some());
                next(&[u64::from(tensor.dtype) << 32 | has_strides << 16 | shape.len() as u64])
                    && shape.iter().chain(strides).all(|&number| next(&[number as u64]))
            })
    }

    fn address(&self, index: usize) -> u64 {
        self.tensors[index].address
    }
}

/// Makes the first two dimensions one, which becomes the second.
fn fold(argument: &'static str, shape: &mut [usize], strides: &mut [i64]) -> Result<(), AttentionError> {
    let ([outer, inner], [by_outer, by_inner]) = ([shape[0], shape[1]], [strides[0], strides[1]]);
    let step = i64::try_from(inner).ok().and_then(|inner| by_inner.checked_mul(inner));
    if outer > 1 && inner > 1 && step != Some(by_outer) {
        let value = format!("{by_outer} and {by_inner}");
        let expected = "leading dimensions beyond the fourth that follow each other without gaps";
        return Err(invalid(argument, "strides", value, expected));
    }
    shape[1] = outer.saturating_mul(inner);
    strides[1] = if inner > 1 { by_inner } else { by_outer };
    Ok(())
}

/// The array with a name.
fn array(name: &str) -> Result<CallArray, AttentionError> {
    let found = (0..abi::END).filter_map(abi::array).find(|array| array.name() == name);
    let expected = || format!("_, q, k, v, out, lse, {} or another of flashcore.h", APPENDED[0]);
    found.ok_or_else(|| invalid("the call's text", "name of a tensor", name, expected()))
}

fn number<T: FromStr>(what: &'static str, value: &str) -> Result<T, AttentionError> {
    value.parse().map_err(|_| invalid("the call's text", what, value, "a number of its range"))
}

fn numbers<T: FromStr>(what: &'static str, values: &str) -> Result<Vec<T>, AttentionError> {
    values.split(',').map(|value| number(what, value.trim())).collect()
}
