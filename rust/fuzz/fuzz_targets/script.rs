//! An input is a script: numbers and octets taken from its front until it is used up.

pub(crate) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// 0 at the end.
    pub(crate) fn octet(&mut self) -> u8 {
        self.octets(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::from(self.octet()) % bound
    }

    /// As many as are there, `count` at most.
    pub(crate) fn octets(&mut self, count: usize) -> &'a [u8] {
        let (octets, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        octets
    }
}
