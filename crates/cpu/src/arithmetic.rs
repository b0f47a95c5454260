//! In which numbers a task is computed: f32 throughout, or 16-bit factors.

use problem::KeyRange;

use crate::aligned::Aligned;
use crate::narrow::Factors;
use crate::simd::{Narrow, Rows, Simd, widen};
use crate::tile::Step;
use crate::view::View;
use crate::{Element, Elements};

/// How a task's inputs become the words that its steps work on.
pub(crate) trait Arithmetic: Copy {
    /// A panel's lanes are a multiple of this.
    const LANES: usize;

    /// Words of a row of Q or K of `dim` elements.
    fn words(self, dim: usize) -> usize;

    /// One row of Q as words, of the opposite sign if `negate`.
    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]);

    /// Rows of K as words, `room` being theirs to use.
    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a>;

    /// Rows of V as words.
    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a>;

    /// One step of the online softmax.
    fn step(self, step: Step<'_>);

    /// What the logits of the words are multiplied by to be those of the elements.
    fn logit_factor(self) -> f64;

    /// What the outputs of the words are multiplied by to be those of the elements.
    fn value_factor(self) -> f32;
}

/// Rows `range` of a head of K or V.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a, T> {
    pub view: View<'a, T>,
    pub batch: usize,
    pub head: usize,
    pub range: KeyRange,
}

impl<'a, T: Element> HeadRows<'a, T> {
    /// Turns the rows into words of `per_word` elements in `room`; a row's last word may have fewer.
    fn convert(
        self,
        per_word: usize,
        room: &'a mut Aligned,
        convert: impl Fn(Elements<'_>, &mut [f32]),
    ) -> Rows<'a> {
        let HeadRows { view, batch, head, range } = self;
        let words = view.dim.div_ceil(per_word);
        room.resize(range.len() * words);
        match view.dense_rows(batch, head, range.start, range.len()) {
            Some(rows) if words * per_word == view.dim => convert(T::elements(rows), room),
            _ => {
                for (row, to) in (range.start..range.end).zip(room.chunks_exact_mut(words)) {
                    convert(T::elements(view.row(batch, head, row)), to);
                }
            }
        }
        Rows { data: room, ld: words }
    }
}

/// f32: words are the elements, widened.
#[derive(Clone, Copy)]
pub(crate) struct Wide<S>(pub S);

impl<S: Simd> Wide<S> {
    /// In place where the rows are dense f32 already.
    fn widened<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let HeadRows { view, batch, head, range } = rows;
        let dense = view.dense_rows(batch, head, range.start, range.len()).map(T::elements);
        match dense {
            Some(Elements::F32(data)) => Rows { data, ld: view.dim },
            _ => rows.convert(1, room, |from, to| widen(self.0, from, to)),
        }
    }
}

impl<S: Simd> Arithmetic for Wide<S> {
    const LANES: usize = S::LANES;

    fn words(self, dim: usize) -> usize {
        dim
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        widen(self.0, row, to);
        if negate {
            to.iter_mut().for_each(|x| *x = -*x);
        }
    }

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    /// Chooses the step compiled for the panel's width.
    fn step(self, step: Step<'_>) {
        match step.panel.width / S::LANES {
            4 if S::MAX_VECTORS >= 4 => self.0.step::<4>(step),
            3 if S::MAX_VECTORS >= 3 => self.0.step::<3>(step),
            2 => self.0.step::<2>(step),
            _ => self.0.step::<1>(step),
        }
    }

    fn logit_factor(self) -> f64 {
        1.0
    }

    fn value_factor(self) -> f32 {
        1.0
    }
}

/// 16-bit factors: words are pairs of integers (Q, K) or of f16 numbers (V).
#[derive(Clone, Copy)]
pub(crate) struct Narrowed<N> {
    pub narrow: N,
    pub factors: Factors,
}

impl<N: Narrow> Arithmetic for Narrowed<N> {
    const LANES: usize = N::LANES;

    fn words(self, dim: usize) -> usize {
        dim.div_ceil(2)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let factor = if negate { -self.factors.q } else { self.factors.q };
        self.narrow.integers(row, factor, to);
    }

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        rows.convert(2, room, |from, to| self.narrow.integers(from, self.factors.k, to))
    }

    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        rows.convert(2, room, |from, to| self.narrow.halves(from, self.factors.v, to))
    }

    fn step(self, step: Step<'_>) {
        self.narrow.step(step);
    }

    fn logit_factor(self) -> f64 {
        1.0 / (f64::from(self.factors.q) * f64::from(self.factors.k))
    }

    fn value_factor(self) -> f32 {
        1.0 / self.factors.v
    }
}
