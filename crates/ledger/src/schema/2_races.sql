-- Those that raced are ranked before the others; nobody asks for a hash.

CREATE INDEX standing_of_races ON standing (problem, device, kind, us) WHERE us IS NOT NULL AND trial = 'race';
DROP INDEX screening_by_ptx;
DROP INDEX screening_by_sass;
