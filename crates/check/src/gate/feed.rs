//! The inputs of one run, independent of the machine that runs it.

use std::sync::Arc;

use emu::Buffer;
use judge::inputs::Style;
use judge::values::Inputs;
use kernels::BufferKind;
use ptx::BufferSpec;

use super::kept;
use super::quantised::{Codes, encode};
use super::rows::OutputRows;
use crate::launchfile::{Bound, Memory, Role, fill};

/// The buffers before a run on normal draws. Outputs hold a NaN pattern.
pub fn contents(bound: &Bound, seed: u64) -> Vec<Vec<u8>> {
    let feed = Feed::draw(bound, Style::Normal, seed);
    feed.map_or_else(Vec::new, |feed| feed.buffers(bound).iter().map(Buffer::to_bytes).collect())
}

/// The inputs of one run: their style, their seed and, for quantised kernels, their codes.
pub struct Feed {
    pub(super) style: Style,
    seed: u64,
    pub(super) drawn: Option<Arc<Inputs>>,
    pub(super) codes: Option<Codes>,
}

/// A kernel before one run: everything that the run and its judges need of the inputs, made once.
pub(super) struct Start {
    /// The buffers. Outputs hold a NaN pattern.
    pub buffers: Vec<Buffer>,
    /// The bytes of the buffers.
    pub before: Vec<Vec<u8>>,
    /// The rows of the outputs, and the bytes that the kernel must write.
    pub rows: OutputRows,
}

impl Feed {
    /// Draws inputs. `None` if the kernel cannot take the style: quantised codes can represent neither NaN
    /// nor infinity.
    pub fn draw(bound: &Bound, style: Style, seed: u64) -> Option<Feed> {
        let quantises = bound.roles.contains(&Role::Scales);
        if quantises && !style.is_finite() {
            return None;
        }
        let drawn = bound.problem.as_ref().map(|problem| kept::inputs(problem, style, seed));
        let codes = bound.problem.as_ref().zip(drawn.as_ref()).filter(|_| quantises);
        let codes = codes.map(|(problem, drawn)| encode(problem, drawn));
        Some(Feed { style, seed, drawn, codes })
    }

    /// Wraps normal draws that were made elsewhere. They have the layout of the kernel's problem.
    pub fn of(inputs: Inputs) -> Feed {
        Feed { style: Style::Normal, seed: 0, drawn: Some(Arc::new(inputs)), codes: None }
    }

    /// The kernel before a run.
    pub(super) fn start(&self, bound: &Bound) -> Start {
        let (buffers, rows) = (self.buffers(bound), self.rows(bound));
        Start { before: buffers.iter().map(Buffer::to_bytes).collect(), buffers, rows }
    }

    /// The rows of the kernel's outputs.
    pub(super) fn rows(&self, bound: &Bound) -> OutputRows {
        OutputRows::of(bound, self.drawn.as_deref())
    }

    /// The buffers before the run. Outputs hold a NaN pattern.
    pub fn buffers(&self, bound: &Bound) -> Vec<Buffer> {
        let (inputs, codes) = (self.drawn.as_deref(), self.codes.as_ref());
        let specs = bound.kernel.buffers.iter().zip(&bound.roles).enumerate();
        let contents = |(index, (spec, role)): (usize, (&BufferSpec, &Role))| match *role {
            Role::Operand(operand) => match inputs.and_then(|inputs| inputs.operands.get(operand)) {
                Some(values) => Buffer::from_bytes(&values.to_bytes()),
                None => match bound.memory(index) {
                    Some(memory) => self.filled(bound, index, &memory),
                    None => Buffer::uninitialised(spec.bytes),
                },
            },
            Role::Fill(ref memory) => self.filled(bound, index, memory),
            Role::Words(words) => {
                let words = bound.words.get(words).map_or(&[][..], Vec::as_slice);
                Buffer::from_bytes(&words.iter().flat_map(emu::argument_bytes).collect::<Vec<u8>>())
            }
            Role::Codes(tensor) => codes
                .and_then(|codes| codes.codes.get(tensor.into()))
                .map_or_else(|| Buffer::uninitialised(spec.bytes), |codes| Buffer::from_bytes(codes)),
            Role::Scales => {
                let scales = codes.iter().flat_map(|c| &c.scales).flat_map(|x| x.to_le_bytes());
                Buffer::from_bytes(&scales.collect::<Vec<u8>>())
            }
            Role::Internal(BufferKind::Counter) => Buffer::from_bytes(&vec![0; spec.bytes]),
            Role::Internal(_) => Buffer::uninitialised(spec.bytes),
        };
        specs.map(contents).collect()
    }

    fn filled(&self, bound: &Bound, index: usize, memory: &Memory) -> Buffer {
        let bytes = bound.kernel.buffers[index].bytes;
        match fill(memory, self.seed.wrapping_add(index as u64), &bound.data) {
            Some(contents) => Buffer::from_bytes(&contents),
            None => Buffer::uninitialised(bytes),
        }
    }
}
