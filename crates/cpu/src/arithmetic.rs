//! In which numbers a task is computed: f32 throughout, or faster ones.

use problem::KeyRange;

use crate::aligned::Aligned;
use crate::simd::{Rows, Simd, widen};
use crate::tile::{MAX_WIDTH, Step};
use crate::view::View;
use crate::{Element, Elements};

/// How a task's inputs become the words that its steps work on.
pub(crate) trait Arithmetic: Copy {
    /// A panel's lanes are a multiple of this.
    const LANES: usize;
    /// Whether a panel's query rows are its lanes, so that Q and O are transposed in it.
    const TRANSPOSED: bool = true;

    /// Words of a row of Q or K of `dim` elements.
    fn words(self, dim: usize) -> usize;

    /// Words of a row of O of `dim` elements.
    fn words_out(self, dim: usize) -> usize {
        dim
    }

    /// One row of Q as words, of the opposite sign if `negate`.
    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]);

    /// Rows of K as words, `room` being theirs to use.
    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a>;

    /// Rows of V as words.
    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a>;

    /// One step of the online softmax.
    fn step(self, step: Step<'_>);

    /// Words that a step on so many keys needs for weights.
    fn weights(self, keys: usize) -> usize {
        keys.next_multiple_of(16) * MAX_WIDTH
    }

    /// What the logits of the words are multiplied by to be those of the elements.
    fn logit_factor(self) -> f64 {
        1.0
    }

    /// Turns sums of the words of V, `width` lanes a row, into those of the elements.
    fn rescale(self, _out: &mut [f32], _width: usize) {}
}

/// Finds, head by head, an arithmetic that is faster than f32 and accurate enough for the head's elements.
pub(crate) trait Faster: Sync {
    type Arithmetic<'a>: Arithmetic
    where
        Self: 'a;

    /// Does `work` with the arithmetic for the query heads of a task, of which `head` is the first, the processor being
    /// set up for it. Returns whether there is one; else nothing is done, and the task is for f32.
    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(Self::Arithmetic<'_>)) -> bool;
}

/// f32 where there is no faster arithmetic.
impl<F: Faster> Faster for Option<F> {
    type Arithmetic<'a>
        = F::Arithmetic<'a>
    where
        Self: 'a;

    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(F::Arithmetic<'_>)) -> bool {
        self.as_ref().is_some_and(|faster| faster.compute(batch, head, work))
    }
}

/// f32 for every head.
pub(crate) struct Never;

impl Faster for Never {
    type Arithmetic<'a> = Wide<crate::simd::Portable>;

    fn compute(&self, _: usize, _: usize, _: impl FnOnce(Self::Arithmetic<'_>)) -> bool {
        false
    }
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
    /// Rows `0..rows` of a head.
    pub(crate) fn all(view: View<'a, T>, batch: usize, head: usize, rows: usize) -> Self {
        HeadRows { view, batch, head, range: KeyRange { start: 0, end: rows } }
    }

    pub(crate) fn rows(self) -> impl Iterator<Item = Elements<'a>> + Clone {
        let HeadRows { view, batch, head, range } = self;
        (range.start..range.end).map(move |row| T::elements(view.row(batch, head, row)))
    }
}

/// f32: words are the elements, widened.
#[derive(Clone, Copy)]
pub(crate) struct Wide<S>(pub S);

impl<S: Simd> Wide<S> {
    /// In place where the rows are dense f32 already.
    fn widened<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let HeadRows { view, batch, head, range } = rows;
        let ld = view.dim;
        let dense = view.dense_rows(batch, head, range.start, range.len()).map(T::elements);
        if let Some(Elements::F32(data)) = dense {
            return Rows { data, ld };
        }
        let to = room.resize(range.len() * ld);
        match dense {
            Some(all) => widen(self.0, all, to),
            None => rows.rows().zip(to.chunks_exact_mut(ld)).for_each(|(row, to)| widen(self.0, row, to)),
        }
        Rows { data: to, ld }
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
}

/// f32, where the lanes are numbers of a row: rows are filled up with zeros to whole vectors.
#[derive(Clone, Copy)]
pub(crate) struct Dotted<S>(pub S);

impl<S: Simd> Dotted<S> {
    /// In place where the rows are dense f32 and whole vectors already.
    fn widened<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim);
        if ld == rows.view.dim {
            return Wide(self.0).widened(rows, room);
        }
        let to = room.resize(rows.range.len() * ld);
        for (row, to) in rows.rows().zip(to.chunks_exact_mut(ld)) {
            self.query(row, false, to);
        }
        Rows { data: to, ld }
    }
}

impl<S: Simd> Arithmetic for Dotted<S> {
    const LANES: usize = 1;
    const TRANSPOSED: bool = false;

    fn words(self, dim: usize) -> usize {
        dim.next_multiple_of(S::LANES)
    }

    fn words_out(self, dim: usize) -> usize {
        self.words(dim)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let (numbers, rest) = to.split_at_mut(row.len());
        Wide(self.0).query(row, negate, numbers);
        rest.fill(0.0);
    }

    fn keys<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    fn values<'a, T: Element>(self, rows: HeadRows<'a, T>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    fn step(self, step: Step<'_>) {
        self.0.step_dims(step);
    }
}
