// How stale was what step 2 trained? Staleness: optimizer steps between the oldest token's weights and the step's.
db.getCollection("audit_training").aggregate([
  { $match: { status: "committed", step: 2 } },
  {
    $group: {
      _id: "$staleness",
      trajectories: { $sum: 1 },
      generated_tokens: { $sum: "$generated_tokens" },
      mean_score: { $avg: "$score" },
      longest_way_seconds: { $max: "$seconds_from_claim_to_plan" },
    },
  },
  { $sort: { _id: 1 } },
]).toArray();
