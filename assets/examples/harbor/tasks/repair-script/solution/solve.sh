#!/bin/bash
cat > /app/total.sh <<'END'
#!/bin/bash
sum=0
for number in "$@"; do
    sum=$((sum + number))
done
echo $sum
END
